//! GSIs of one device's queues, and the adapter indicators that they lead to.

use std::ops::Range;

use arch::s390x::kvm::Route;
use devices::virtio::ccw::AdapterIndicators;

/// The GSIs of a device: one a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes(Range<u32>);

impl Routes {
    /// `queues` GSIs from `first` on.
    pub fn new(first: u32, queues: usize) -> Self {
        let queues = u32::try_from(queues).unwrap_or(u32::MAX);
        Self(first..first.saturating_add(queues))
    }

    /// The GSIs.
    pub fn gsis(&self) -> Range<u32> {
        self.0.clone()
    }

    /// The routes to a driver's indicators.
    pub fn to(&self, at: AdapterIndicators) -> Vec<Route> {
        let bits = (0..).map(|queue| at.first_bit.wrapping_add(queue));
        let routes = self.gsis().zip(bits).map(|(gsi, bit)| Route {
            gsi,
            indicators: at.indicators,
            bit,
            summary: at.summary,
            isc: at.isc,
        });
        routes.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_its_bit() {
        let routes = Routes::new(5, 2);
        assert_eq!(routes.gsis(), 5..7);
        let at = AdapterIndicators {
            summary: 0x2000,
            indicators: 0x1000,
            first_bit: 63,
            isc: 3,
        };
        let to = routes.to(at);
        let bits: Vec<_> = to.iter().map(|route| (route.gsi, route.bit)).collect();
        assert_eq!(bits, [(5, 63), (6, 64)]);
        assert!(
            to.iter()
                .all(|r| (r.summary, r.indicators, r.isc) == (0x2000, 0x1000, 3))
        );
    }
}
