//! The known name that a mistyped one most likely meant.

/// The name of `known` nearest to `given`, if one is near enough to be worth proposing.
pub fn nearest<'a>(given: &str, known: &[&'a str]) -> Option<&'a str> {
    let given = given.to_lowercase().replace('_', "-");
    known
        .iter()
        .map(|name| (strsim::damerau_levenshtein(&given, name), *name))
        .filter(|(distance, name)| {
            *distance <= 1 + name.len() / 4 || (given.len() >= 3 && name.starts_with(&given))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposes_what_is_near_and_nothing_else() {
        let known = ["path", "queues", "queue-size", "readonly", "iothread"];
        assert_eq!(nearest("quues", &known), Some("queues"));
        assert_eq!(nearest("queue_size", &known), Some("queue-size"));
        assert_eq!(nearest("read-only", &known), Some("readonly"));
        assert_eq!(nearest("IOThread", &known), Some("iothread"));
        assert_eq!(nearest("netdev", &known), None);
        assert_eq!(nearest("", &known), None);
    }
}
