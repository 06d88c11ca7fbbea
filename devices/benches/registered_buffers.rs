//! What registered buffers (`READ_FIXED`) save beside plain reads into the same memory, on a bare
//! ring with a registered file: CPU time of the submitting thread a request, turn by turn, as a
//! ratio with its spread. `cargo bench -p devices --bench registered_buffers -- buffered direct`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use io_uring::{IoUring, opcode, squeue, types};

const FILE_BYTES: u64 = 256 << 20;
const MEMORY_BYTES: usize = 256 << 20;
const TURNS: usize = 9;

/// Memory as a guest has it: anonymous, touched.
struct Memory(*mut u8);

impl Memory {
    fn new() -> Memory {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), MEMORY_BYTES, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the mapping has so many bytes.
        unsafe { start.cast::<u8>().write_bytes(1, MEMORY_BYTES) };
        Memory(start.cast())
    }
}

fn thread_cpu_ns() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

struct Bench {
    ring: IoUring,
    memory: Memory,
    random: u64,
}

impl Bench {
    fn new(file: &File) -> Bench {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(256)
            .expect("a ring");
        let memory = Memory::new();
        ring.submitter()
            .register_files(&[file.as_raw_fd()])
            .expect("a registered file");
        let piece = libc::iovec {
            iov_base: memory.0.cast(),
            iov_len: MEMORY_BYTES,
        };
        // SAFETY: the memory stays mapped as long as the process lives.
        unsafe { ring.submitter().register_buffers(&[piece]) }
            .expect("a registered buffer; raise RLIMIT_MEMLOCK");
        Bench {
            ring,
            memory,
            random: 1,
        }
    }

    fn next(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.random >> 20
    }

    fn entry(&mut self, bytes: u32, fixed: bool) -> squeue::Entry {
        let offset = self.next() % (FILE_BYTES / 4096 - 64) * 4096;
        let at = self.next() as usize % (MEMORY_BYTES / 4096 - 64) * 4096;
        let to = self.memory.0.wrapping_add(at);
        let file = types::Fixed(0);
        if fixed {
            opcode::ReadFixed::new(file, to, bytes, 0)
                .offset(offset)
                .build()
        } else {
            opcode::Read::new(file, to, bytes).offset(offset).build()
        }
    }

    /// CPU-ns a request.
    fn run(&mut self, requests: u64, depth: usize, bytes: u32, fixed: bool) -> f64 {
        let begin = thread_cpu_ns();
        let (mut flying, mut done) = (0, 0);
        while done < requests {
            while flying < depth {
                let entry = self.entry(bytes, fixed);
                // SAFETY: the memory stays mapped as long as the process lives.
                unsafe { self.ring.submission().push(&entry) }.expect("room");
                flying += 1;
            }
            self.ring.submit_and_wait(1).expect("an enter");
            for completion in self.ring.completion() {
                assert_eq!(completion.result(), bytes as i32);
                flying -= 1;
                done += 1;
            }
        }
        while flying > 0 {
            self.ring.submit_and_wait(1).expect("an enter");
            flying -= self.ring.completion().count();
        }
        (thread_cpu_ns() - begin) as f64 / done as f64
    }
}

fn main() {
    let path = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file here");
    std::fs::write(path.path(), vec![0x5a; FILE_BYTES as usize]).expect("the file's contents");
    path.as_file().sync_all().expect("written");
    let named = |word: &str| std::env::args().any(|argument| argument == word);
    let both = named("buffered") == named("direct");
    for direct in [false, true] {
        if !both && direct != named("direct") {
            continue;
        }
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let mut options = File::options();
        let Ok(file) = options.read(true).custom_flags(flags).open(path.path()) else {
            println!("skipped: no O_DIRECT here");
            continue;
        };
        let mut bench = Bench::new(&file);
        for depth in [1, 32] {
            for bytes in [512, 4096, 8192, 65536] {
                let requests = if direct { 1_500 } else { 100_000 };
                bench.run(requests / 10, depth, bytes, false);
                bench.run(requests / 10, depth, bytes, true);
                let mut turns: Vec<(f64, f64)> = (0..TURNS)
                    .map(|_| {
                        let plain = bench.run(requests, depth, bytes, false);
                        (plain, bench.run(requests, depth, bytes, true))
                    })
                    .collect();
                turns.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
                let ratio = |at: usize| turns[at].1 / turns[at].0;
                let (plain, fixed) = turns[TURNS / 2];
                println!(
                    "direct={direct:5} depth={depth:2} bs={bytes:5}: {plain:6.0} CPU-ns plain, {fixed:6.0} fixed, ratio {:.3} ({:.3} to {:.3})",
                    ratio(TURNS / 2),
                    ratio(1),
                    ratio(TURNS - 2),
                );
            }
        }
    }
}
