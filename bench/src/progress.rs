//! Tells how far a measurement is: a bar with the time left on a terminal, lines elsewhere.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::matrix::{Layout, Run};
use crate::record::Measurement;
use crate::runner::{Progress, Round};

/// What suits standard error; runs are named as in the report.
pub fn choose(layout: Layout) -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar::new(layout))
    } else {
        Box::new(Lines {
            layout,
            round: String::new(),
            done: 0,
            all: 0,
        })
    }
}

fn label(layout: &Layout, run: &Run) -> String {
    format!("{}, {}", layout.name(run), layout.load(run))
}

fn round_text(round: Round) -> String {
    match round {
        Round::WarmUp => "warm-up".into(),
        Round::Measured(number) => format!("round {}", number + 1),
    }
}

fn measured_text(measurement: &Measurement) -> String {
    format!(
        "{:.0} IOPS, {:.1}% CPU",
        measurement.iops,
        measurement.cpu_percent()
    )
}

/// A line for each measurement.
struct Lines {
    layout: Layout,
    round: String,
    done: usize,
    all: usize,
}

impl Lines {
    fn line(&mut self, run: &Run, text: &str) {
        self.done += 1;
        eprintln!(
            "[{}/{}] {}, {}: {text}",
            self.done,
            self.all,
            self.round,
            label(&self.layout, run)
        );
    }
}

impl Progress for Lines {
    fn begin(&mut self, round: Round, _: &Run, done: usize, all: usize) {
        self.round = round_text(round);
        self.done = done;
        self.all = all;
    }

    fn measured(&mut self, run: &Run, measurement: &Measurement) {
        self.line(run, &measured_text(measurement));
    }

    fn failed(&mut self, run: &Run, message: &str) {
        self.line(run, &format!("failed: {message}"));
    }

    fn end(&mut self) {}
}

/// A bar with the time left.
struct Bar {
    bar: ProgressBar,
    layout: Layout,
}

impl Bar {
    fn new(layout: Layout) -> Bar {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style = "{bar:30} {pos}/{len}  {elapsed} gone, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Bar { bar, layout }
    }
}

impl Progress for Bar {
    fn begin(&mut self, round: Round, run: &Run, done: usize, all: usize) {
        if self.bar.length() != Some(all as u64) {
            self.bar.set_length(all as u64);
            self.bar.enable_steady_tick(Duration::from_millis(500));
        }
        self.bar.set_position(done as u64);
        self.bar.set_message(format!(
            "{}, {}",
            round_text(round),
            label(&self.layout, run)
        ));
    }

    fn measured(&mut self, _: &Run, _: &Measurement) {
        self.bar.inc(1);
    }

    fn failed(&mut self, run: &Run, message: &str) {
        self.bar.inc(1);
        self.bar
            .println(format!("{}: failed: {message}", label(&self.layout, run)));
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
    }
}
