//! The little of SVG that the charts need: scales with round ticks, axes, marks.
//!
//! Written here because the page wants marks with tooltips and colours that follow the reader's
//! light or dark theme, which drawing libraries that aim at pixels do not give.

use std::fmt::Write as _;

/// Colours of series, as CSS variables; after the last they begin anew with another mark.
pub const COLOURS: usize = 8;

/// Text for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A number of few letters: `950`, `12.5k`, `1.2M`.
pub fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 999_950_000.0 => (value / 1e9, "G"),
        v if v >= 999_950.0 => (value / 1e6, "M"),
        v if v >= 1_000.0 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{scaled:.decimals$}");
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text}{unit}")
}

/// Maps values to a stretch of the drawing.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    log: bool,
    step: f64,
}

impl Scale {
    /// From zero to a round number above `high`, drawn from `from` to `to`.
    pub fn from_zero(high: f64, from: f64, to: f64) -> Scale {
        let step = round_step(high.max(f64::MIN_POSITIVE), 5.0);
        let high = (high / step).ceil().max(1.0) * step;
        Scale {
            low: 0.0,
            high,
            from,
            to,
            log: false,
            step,
        }
    }

    /// Between round numbers around `low` and `high`.
    pub fn around(low: f64, high: f64, from: f64, to: f64) -> Scale {
        let margin = ((high - low) * 0.1)
            .max(high.abs() * 0.02)
            .max(f64::MIN_POSITIVE);
        let step = round_step(high - low + 2.0 * margin, 5.0);
        let low = ((low - margin) / step).floor().max(0.0) * step;
        let high = ((high + margin) / step).ceil() * step;
        Scale {
            low,
            high,
            from,
            to,
            log: false,
            step,
        }
    }

    /// Logarithmic, over whole powers of ten.
    pub fn log(low: f64, high: f64, from: f64, to: f64) -> Scale {
        let low = 10f64.powf(low.max(1e-9).log10().floor());
        let high = 10f64.powf(high.max(low * 10.0).log10().ceil());
        Scale {
            low,
            high,
            from,
            to,
            log: true,
            step: 10.0,
        }
    }

    /// Where a value lies; values beyond the ends lie there.
    pub fn at(&self, value: f64) -> f64 {
        let value = value.clamp(self.low, self.high);
        let part = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + part * (self.to - self.from)
    }

    /// Round values to write beside it.
    pub fn ticks(&self) -> Vec<f64> {
        let mut ticks = Vec::new();
        let mut value = self.low;
        while value <= self.high * (1.0 + 1e-9) && ticks.len() < 20 {
            ticks.push(value);
            value = if self.log {
                value * self.step
            } else {
                value + self.step
            };
        }
        ticks
    }
}

/// 1, 2 or 5 times a power of ten, such that `length` has about `count` of it.
fn round_step(length: f64, count: f64) -> f64 {
    let raw = length / count;
    let power = 10f64.powf(raw.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|f| f * power >= raw)
        .unwrap_or(10.0);
    factor * power
}

/// A drawing with room for axes around its plot.
pub struct Drawing {
    body: String,
    width: f64,
    height: f64,
    title: String,
}

/// The plot's corners within a drawing of 460 by 300.
pub const PLOT: (f64, f64, f64, f64) = (58.0, 16.0, 444.0, 252.0);

impl Drawing {
    /// Empty. The title is what a screen reader says.
    pub fn new(title: &str, width: f64, height: f64) -> Drawing {
        Drawing {
            body: String::new(),
            width,
            height,
            title: title.into(),
        }
    }

    /// Of the size that [`PLOT`] is for.
    pub fn plot(title: &str) -> Drawing {
        Drawing::new(title, 460.0, 300.0)
    }

    /// Axes with grid lines and captions. `x_text` writes a tick of the lower axis.
    pub fn axes(&mut self, x: &Scale, y: &Scale, x_caption: &str, y_caption: &str) {
        let (left, top, right, bottom) = PLOT;
        for tick in y.ticks() {
            let at = y.at(tick);
            self.line("grid", left, at, right, at);
            self.text("tick end", left - 6.0, at + 3.5, &short(tick));
        }
        for tick in x.ticks() {
            let at = x.at(tick);
            self.line("grid", at, top, at, bottom);
            self.text("tick middle", at, bottom + 14.0, &short(tick));
        }
        self.captions(x_caption, y_caption);
    }

    /// The captions of both axes.
    pub fn captions(&mut self, x_caption: &str, y_caption: &str) {
        let (left, top, right, bottom) = PLOT;
        self.line("axis", left, bottom, right, bottom);
        self.line("axis", left, top, left, bottom);
        self.text(
            "caption middle",
            f64::midpoint(left, right),
            bottom + 34.0,
            x_caption,
        );
        let middle = f64::midpoint(top, bottom);
        let _ = write!(
            self.body,
            r#"<text class="caption middle" transform="translate(13 {middle:.1}) rotate(-90)">{}</text>"#,
            escape(y_caption)
        );
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ = write!(
            self.body,
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        );
    }

    /// A line through points.
    pub fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let list: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = write!(
            self.body,
            r#"<polyline class="{class}" points="{}"/>"#,
            list.join(" ")
        );
    }

    /// A text.
    pub fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let _ = write!(
            self.body,
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{}</text>"#,
            escape(text)
        );
    }

    /// A rectangle with a tooltip.
    pub fn bar(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64, tip: &str) {
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{:.1}" height="{:.1}"><title>{}</title></rect>"#,
            width.max(0.0),
            height.max(0.0),
            escape(tip)
        );
    }

    /// The mark of a series at a point, with a tooltip.
    pub fn mark(&mut self, series: usize, x: f64, y: f64, tip: &str) {
        let class = format!("mark s{}", series % COLOURS);
        let shape = match series / COLOURS % 3 {
            0 => format!(r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="4.5">"#),
            1 => format!(
                r#"<rect class="{class}" x="{:.1}" y="{:.1}" width="8" height="8">"#,
                x - 4.0,
                y - 4.0
            ),
            _ => format!(
                r#"<path class="{class}" d="M{x:.1} {:.1}l5 8.5h-10z">"#,
                y - 5.5
            ),
        };
        let end = match series / COLOURS % 3 {
            0 => "circle",
            1 => "rect",
            _ => "path",
        };
        let _ = write!(self.body, "{shape}<title>{}</title></{end}>", escape(tip));
    }

    /// The drawing as an element of HTML.
    pub fn finish(self) -> String {
        format!(
            r#"<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>"#,
            self.width,
            self.height,
            escape(&self.title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (9.5, "9.5"),
            (950.0, "950"),
            (12_500.0, "12.5k"),
            (200_000.0, "200k"),
            (999_960.0, "1M"),
            (1_234_000.0, "1.23M"),
            (5e9, "5G"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }

    proptest! {
        #[test]
        fn scales_keep_order_and_ends(low in 0f64..1e6, length in 0f64..1e6, x in 0f64..1.0) {
            let high = low + length;
            for scale in [
                Scale::from_zero(high, 10.0, 90.0),
                Scale::around(low, high, 10.0, 90.0),
                Scale::log(low, high, 10.0, 90.0),
            ] {
                let value = low + x * length;
                let at = scale.at(value);
                prop_assert!((10.0..=90.0).contains(&at), "{scale:?} {value} {at}");
                prop_assert!(scale.at(high) >= at);
                let ticks = scale.ticks();
                prop_assert!((2..=20).contains(&ticks.len()), "{scale:?} {ticks:?}");
                prop_assert!(ticks.windows(2).all(|t| t[0] < t[1]));
            }
        }
    }
}
