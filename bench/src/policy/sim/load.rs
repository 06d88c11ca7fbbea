//! Loads, and how they are written.

use std::fmt;
use std::str::FromStr;

/// How service times are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Exponential: a long tail.
    Exp,
    /// Gamma of shape 16: a fast device.
    Gamma,
    /// Within 3 % of the mean.
    Fixed,
    /// Nine of ten take half the mean, the others 5.5 times it.
    Bimodal,
    /// Gamma of shape 4: a slow device.
    Slow,
}

const SERVICES: [(&str, Service); 5] = [
    ("exp", Service::Exp),
    ("gamma", Service::Gamma),
    ("fixed", Service::Fixed),
    ("bimodal", Service::Bimodal),
    ("slow", Service::Slow),
];

/// When a guest submits its next request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// So long after one has completed, in nanoseconds.
    Think(f64),
    /// At a fixed rate, whatever completes: every so many nanoseconds.
    Every(f64),
    /// As soon as it can for the first time, then not at all for the second, again and again; both
    /// in nanoseconds.
    Bursts(f64, f64),
}

/// From the end of a request to the guest's next, if it has nothing else to do.
const GUEST_NS: f64 = 4000.0;

/// A load: `gamma:75us:4`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// How service times are spread.
    pub service: Service,
    /// Their scale in nanoseconds.
    pub mean_ns: f64,
    /// Requests that circulate.
    pub depth: u32,
    /// When the next one comes.
    pub pace: Pace,
}

impl Load {
    /// The loads of the design's table.
    #[must_use]
    pub fn usual() -> Vec<Load> {
        let load = |service, us: u32, depth| Load {
            service,
            mean_ns: f64::from(us) * 1e3,
            depth,
            pace: Pace::Think(GUEST_NS),
        };
        vec![
            load(Service::Gamma, 75, 1),
            load(Service::Gamma, 75, 4),
            load(Service::Gamma, 75, 16),
            load(Service::Exp, 80, 8),
            load(Service::Bimodal, 60, 8),
            load(Service::Fixed, 12, 1),
            load(Service::Fixed, 20, 1),
            load(Service::Gamma, 10, 4),
            load(Service::Exp, 80, 32),
            load(Service::Slow, 2000, 4),
        ]
    }

    /// When a request whose predecessor ended at `now_ns` is submitted.
    pub(super) fn next_ns(&self, now_ns: f64) -> f64 {
        match self.pace {
            Pace::Think(think_ns) => now_ns + think_ns,
            Pace::Every(_) => f64::INFINITY,
            Pace::Bursts(on_ns, off_ns) => {
                let next_ns = now_ns + GUEST_NS;
                let cycle_ns = on_ns + off_ns;
                match next_ns % cycle_ns < on_ns {
                    true => next_ns,
                    false => (next_ns / cycle_ns).ceil() * cycle_ns,
                }
            }
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = SERVICES
            .iter()
            .find(|(_, service)| *service == self.service);
        let name = found.map_or("", |(name, _)| name);
        write!(f, "{name}:{}us:{}", self.mean_ns / 1e3, self.depth)?;
        match self.pace {
            Pace::Think(GUEST_NS) => Ok(()),
            Pace::Think(ns) => write!(f, ":think={}us", ns / 1e3),
            Pace::Every(ns) => write!(f, ":every={}us", ns / 1e3),
            Pace::Bursts(on_ns, off_ns) => {
                write!(f, ":burst={}us/{}us", on_ns / 1e3, off_ns / 1e3)
            }
        }
    }
}

/// A text that is no load.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no load; write SPREAD:MEAN:DEPTH such as gamma:75us:4, with a spread of exp, gamma, fixed, bimodal or slow, and after it :think=50us, :every=100us or :burst=20000us/80000us"
)]
pub struct UnknownLoad(String);

fn us(text: &str) -> Option<f64> {
    let us: f64 = text.strip_suffix("us").unwrap_or(text).parse().ok()?;
    (us > 0.0 && us <= 1e7).then_some(us * 1e3)
}

fn pace(text: &str) -> Option<Pace> {
    match text.split_once('=')? {
        ("think", time) => us(time).map(Pace::Think),
        ("every", time) => us(time).map(Pace::Every),
        ("burst", times) => {
            let (on, off) = times.split_once('/')?;
            Some(Pace::Bursts(us(on)?, us(off)?))
        }
        _ => None,
    }
}

impl FromStr for Load {
    type Err = UnknownLoad;

    fn from_str(text: &str) -> Result<Self, UnknownLoad> {
        let parts: Vec<&str> = text.split(':').collect();
        let load = || {
            let (service, mean, depth, rest) = match parts[..] {
                [service, mean, depth] => (service, mean, depth, None),
                [service, mean, depth, rest] => (service, mean, depth, Some(rest)),
                _ => return None,
            };
            let service = SERVICES.iter().find(|(name, _)| *name == service)?.1;
            let depth: u32 = depth.parse().ok()?;
            let pace = rest.map_or(Some(Pace::Think(GUEST_NS)), pace)?;
            (1..=65536).contains(&depth).then_some(Load {
                service,
                mean_ns: us(mean)?,
                depth,
                pace,
            })
        };
        load().ok_or_else(|| UnknownLoad(text.to_owned()))
    }
}
