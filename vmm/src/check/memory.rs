//! Memory for guests, huge pages, and how much of it may be locked.

use rustix::process::{Resource, getrlimit};

use super::host::{Host, size};
use super::{Finding, Verdict};

/// Below this, io_uring may be refused its rings on kernels before 5.12.
const LITTLE_MEMLOCK_BYTES: u64 = 8 << 20;

pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = vec![available(host)];
    findings.push(huge_pages(host));
    findings.extend(transparent(host));
    findings.push(locked(getrlimit(Resource::Memlock).current));
    findings
}

fn available(host: &Host) -> Finding {
    match (
        host.meminfo_bytes("MemAvailable"),
        host.meminfo_bytes("MemTotal"),
    ) {
        (Some(available), Some(total)) => {
            let text = format!("{} of {} available", size(available), size(total));
            // --memory takes no less.
            let verdict = match available >= crate::config::check::MIN_MEMORY.0 {
                true => Verdict::Good,
                false => Verdict::Fatal,
            };
            Finding::new(verdict, text)
        }
        _ => Finding::new(
            Verdict::Note,
            "/proc/meminfo cannot be read: memory is not known",
        ),
    }
}

/// The pools of huge pages: their page size, and how many pages are free.
fn huge_pages(host: &Host) -> Finding {
    let directory = "sys/kernel/mm/hugepages";
    let pools = host.list(directory).into_iter().filter_map(|name| {
        let kib: u64 = name
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
        let count = |file: &str| host.number(&format!("{directory}/{name}/{file}"));
        Some((kib << 10, count("free_hugepages")?, count("nr_hugepages")?))
    });
    let mut pools: Vec<(u64, u64, u64)> = pools.collect();
    pools.sort_unstable();
    let free: Vec<String> = pools
        .iter()
        .filter(|(_, _, pages)| *pages > 0)
        .map(|(bytes, free, pages)| format!("{free} of {pages} pages of {} free", size(*bytes)))
        .collect();
    match (pools.is_empty(), free.is_empty()) {
        (true, _) => Finding::new(Verdict::Missing, "huge pages: the kernel has none"),
        (false, true) => Finding::new(
            Verdict::Note,
            "huge pages: none set aside; for --memory hugepages=on set vm.nr_hugepages",
        ),
        (false, false) => Finding::new(Verdict::Good, format!("huge pages: {}", free.join(", "))),
    }
}

fn transparent(host: &Host) -> Option<Finding> {
    let modes = host.read("sys/kernel/mm/transparent_hugepage/enabled")?;
    let mode = modes.split(['[', ']']).nth(1)?;
    Some(match mode {
        "never" => Finding::new(
            Verdict::Slow,
            "transparent huge pages: never; the guest's memory is of small pages unless --memory hugepages=on",
        ),
        _ => Finding::new(Verdict::Good, format!("transparent huge pages: {mode}")),
    })
}

fn locked(limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::new(Verdict::Good, "locked memory: no limit"),
        Some(bytes) if bytes < LITTLE_MEMLOCK_BYTES => Finding::new(
            Verdict::Slow,
            format!(
                "locked memory: at most {} (ulimit -l); io_uring needs some for rings and buffers, allow 8 MiB or more",
                size(bytes)
            ),
        ),
        Some(bytes) => Finding::new(
            Verdict::Good,
            format!("locked memory: at most {} (ulimit -l)", size(bytes)),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::Made;
    use super::*;

    #[test]
    fn huge_pages_are_counted_by_size() {
        let of = |files: &[(&str, &str)]| huge_pages(&Made::of(files).host);
        assert_eq!(of(&[]).verdict, Verdict::Missing);
        let pool =
            |name: &str, file: &str| format!("sys/kernel/mm/hugepages/hugepages-{name}/{file}");
        let files = [
            (pool("1048576kB", "free_hugepages"), "0"),
            (pool("1048576kB", "nr_hugepages"), "0"),
            (pool("2048kB", "free_hugepages"), "3"),
            (pool("2048kB", "nr_hugepages"), "8"),
        ];
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (path.as_str(), *text))
            .collect();
        assert_eq!(of(&files[..2]).verdict, Verdict::Note);
        let some = of(&files);
        assert_eq!(some.verdict, Verdict::Good);
        assert_eq!(some.text, "huge pages: 3 of 8 pages of 2 MiB free");
    }

    #[test]
    fn too_little_memory_is_fatal() {
        let of = |kib: u64| {
            let meminfo = format!("MemTotal: 1048576 kB\nMemAvailable: {kib} kB\n");
            available(&Made::of(&[("proc/meminfo", &meminfo)]).host)
        };
        assert_eq!(of(65535).verdict, Verdict::Fatal);
        let enough = of(65536);
        assert_eq!(
            (enough.verdict, enough.text.as_str()),
            (Verdict::Good, "64 MiB of 1 GiB available")
        );
        assert_eq!(available(&Made::of(&[]).host).verdict, Verdict::Note);
    }

    #[test]
    fn transparent_huge_pages_and_locked_memory_are_judged() {
        let of = |text: &str| {
            let made = Made::of(&[("sys/kernel/mm/transparent_hugepage/enabled", text)]);
            transparent(&made.host).map(|finding| finding.verdict)
        };
        assert_eq!(of("always [madvise] never"), Some(Verdict::Good));
        assert_eq!(of("always madvise [never]"), Some(Verdict::Slow));
        assert_eq!(of("nonsense"), None);
        assert_eq!(locked(None).verdict, Verdict::Good);
        assert_eq!(locked(Some(8 << 20)).verdict, Verdict::Good);
        assert_eq!(locked(Some(64 << 10)).verdict, Verdict::Slow);
    }
}
