//! Names and patterns of events.

use iothread::trace::TraceEvent;

use super::Error;

/// A set of events, by their place in [`EVENTS`].
pub type Mask = u32;

/// All events.
pub const EVENTS: [&str; TraceEvent::NAMES.len()] = TraceEvent::NAMES;

/// The events that `pattern` names: a name, or one with `*` for any text and `?` for a character. A
/// pattern may match none; a name must be known.
///
/// # Errors
/// It is a name, and not that of an event.
pub fn select(pattern: &str) -> Result<Mask, Error> {
    let events = EVENTS.iter().enumerate();
    let named = events.filter(|(_, name)| matches(pattern, name));
    let mask = named.fold(0, |mask, (place, _)| mask | 1 << place);
    if mask == 0 && !is_pattern(pattern) {
        let name = pattern.to_owned();
        return Err(Error::Unknown { name });
    }
    Ok(mask)
}

fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

/// Whether `name` is of the form `pattern`.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    // On a mismatch the last star takes one more character: no recursion, and no time explosion.
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match &mut star {
                Some((at, taken)) => {
                    *taken += 1;
                    p = *at + 1;
                    n = *taken;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pattern: &str) -> Vec<&'static str> {
        let mask = select(pattern).unwrap();
        let events = EVENTS.iter().enumerate();
        events
            .filter(|(place, _)| mask & 1 << place != 0)
            .map(|(_, name)| *name)
            .collect()
    }

    #[test]
    fn patterns_select_as_a_shell_would() {
        assert_eq!(names("*"), EVENTS);
        assert_eq!(names("**"), EVENTS);
        assert_eq!(names("poll_grow"), ["poll_grow"]);
        let run = ["run_poll_handlers_begin", "run_poll_handlers_end"];
        assert_eq!(names("run_*"), run);
        assert_eq!(names("*_begin"), [run[0]]);
        assert_eq!(names("*poll*e?d"), [run[1]]);
        assert_eq!(names("poll_?????"), ["poll_trial"]);
        assert_eq!(names("poll_????"), ["poll_grow"]);
        assert_eq!(names("poll_*").len(), 9);
        assert_eq!(names("x*"), [""; 0]);
    }

    #[test]
    fn a_wrong_name_is_told_with_the_nearest() {
        let error = select("pol_grow").unwrap_err().to_string();
        assert_eq!(error, "unknown event \"pol_grow\"; did you mean poll_grow?");
        let error = select("xyz").unwrap_err().to_string();
        assert!(error.ends_with("; there are run_poll_handlers_begin, run_poll_handlers_end, poll_grow, poll_shrink, poll_add, poll_remove, poll_dispatch, poll_observe, poll_handler, poll_reading, poll_trial"), "{error}");
    }
}
