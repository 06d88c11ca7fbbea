//! A disk in a vector against the real one, over random sequences of everything.

use proptest::prelude::*;

use super::board::Wire;
use super::rig::*;
use crate::virtio::block::image::{Alignment, DEMANDED};
use crate::virtio::block::*;
use crate::virtio::device::VirtioDevice;

#[derive(Clone, Debug)]
enum Step {
    Read {
        sector: u64,
        sectors: u32,
        cuts: Vec<u32>,
    },
    Write {
        sector: u64,
        sectors: u32,
        seed: u64,
        cuts: Vec<u32>,
    },
    Zero {
        sector: u64,
        sectors: u32,
        unmap: bool,
    },
    Discard {
        sector: u64,
        sectors: u32,
    },
    Flush,
    Id,
    Cache(bool),
    Resize(u64),
    Reset,
    Move,
    /// One of the iothread's settings.
    Set(&'static str, i64),
}

const SECTORS: u64 = 512;

fn range() -> impl Strategy<Value = (u64, u32)> {
    // Mostly inside, sometimes beyond.
    (0..SECTORS + 40, 0u32..64)
}

fn cuts() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1u32..1500, 0..20)
}

fn setting() -> impl Strategy<Value = (&'static str, i64)> {
    let values = |name, values: &[i64]| {
        prop::sample::select(values.to_vec()).prop_map(move |value| (name, value))
    };
    prop_oneof![
        3 => values("poll-max-ns", &[0, 1, 4000, 32768, 1_000_000]),
        1 => values("poll-grow", &[0, 2, 5]),
        1 => values("poll-shrink", &[0, 2, 5]),
        1 => values("poll-weight", &[1, 3, 5]),
        1 => values("aio-max-batch", &[0, 1, 16]),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (range(), cuts()).prop_map(|((sector, sectors), cuts)| Step::Read { sector, sectors, cuts }),
        6 => (range(), any::<u64>(), cuts())
            .prop_map(|((sector, sectors), seed, cuts)| Step::Write { sector, sectors, seed, cuts }),
        2 => (range(), any::<bool>()).prop_map(|((sector, sectors), unmap)| Step::Zero { sector, sectors, unmap }),
        1 => range().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        1 => Just(Step::Flush),
        1 => Just(Step::Id),
        1 => any::<bool>().prop_map(Step::Cache),
        1 => (1..=SECTORS * 2).prop_map(Step::Resize),
        1 => Just(Step::Reset),
        1 => Just(Step::Move),
        1 => setting().prop_map(|(name, value)| Step::Set(name, value)),
    ]
}

/// Cuts `bytes` into pieces of the lengths in `cuts`, the rest last.
fn pieces(guest: &mut Guest, bytes: u32, cuts: &[u32], writable: bool) -> Vec<(u64, u32, bool)> {
    let mut left = bytes;
    let mut pieces = Vec::new();
    for &cut in cuts.iter().chain([&u32::MAX]) {
        let len = cut.min(left);
        if len == 0 {
            break;
        }
        left -= len;
        pieces.push((guest.alloc(len.into(), u64::from(cut % 7)), len, writable));
    }
    pieces
}

fn transfer(
    guest: &mut Guest,
    request: u32,
    sector: u64,
    data: &[u8],
    bytes: u32,
    cuts: &[u32],
) -> Reply {
    use vm_memory::{Bytes, GuestAddress};
    guest.recycle();
    let header = guest.put(&Guest::header(request, sector), 0);
    let mut buffers = vec![(header, 16, false)];
    let body = pieces(guest, bytes, cuts, request == IN);
    let mut at = 0;
    for &(addr, len, writable) in &body {
        if !writable {
            let piece = &data[at..at + len as usize];
            guest
                .ring
                .mem
                .write_slice(piece, GuestAddress(addr))
                .unwrap();
            at += len as usize;
        }
    }
    buffers.extend(body);
    buffers.push((guest.alloc(1, 0), 1, true));
    let head = guest.offer(&buffers);
    guest.kick();
    guest.wait(head)
}

/// An iothread with one of the polling policies.
fn policy_thread(number: usize) -> iothread::IoThread {
    use iothread::PolicyKind::{Always, Context, Off, PerHandler, Weighted};
    iothread::IoThread::start(iothread::IoThreadConfig {
        id: format!("t{number}"),
        context: iothread::ContextConfig {
            policy: [Weighted, PerHandler, Context, Off, Always][number % 5],
            ..iothread::ContextConfig::default()
        },
        ..iothread::IoThreadConfig::default()
    })
    .unwrap()
}

fn run(engine: EngineKind, strict: bool, steps: Vec<Step>) -> Result<(), TestCaseError> {
    run_with(|options| options.engine(engine), strict, steps)
}

fn run_with(
    change: impl FnOnce(Options) -> Options,
    strict: bool,
    steps: Vec<Step>,
) -> Result<(), TestCaseError> {
    let file = image(SECTORS * 512);
    let mut model = vec![0u8; SECTORS as usize * 512];
    let mut options = change(Options::new(file.path()).with(|d| d.serial = "model".into()));
    if strict {
        DEMANDED.set(Some(Alignment {
            memory: 512,
            offset: 4096,
        }));
    }
    // Behind any transport, on threads of any two polling policies.
    let dice = steps.len()
        + steps
            .iter()
            .filter(|s| matches!(s, Step::Read { .. }))
            .count();
    options.wire = Wire::ALL[dice % 3];
    let threads = (0..2).map(|i| policy_thread(dice + i)).collect();
    let mut rig = Rig::on(options, threads);
    DEMANDED.set(None);
    let mut home = 0;
    for step in steps {
        let capacity = model.len() as u64 / 512;
        let inside = |sector: u64, sectors: u32| sector + u64::from(sectors) <= capacity;
        let bounds = |sector: u64, sectors: u32| {
            let start = sector as usize * 512;
            start..start + sectors as usize * 512
        };
        let expected = |sector, sectors| if inside(sector, sectors) { OK } else { IOERR };
        let guest = &mut rig.guests[0];
        match step.clone() {
            Step::Read {
                sector,
                sectors,
                cuts,
            } => {
                let reply = transfer(guest, IN, sector, &[], sectors * 512, &cuts);
                prop_assert_eq!(reply.status, expected(sector, sectors));
                if reply.status == OK {
                    prop_assert!(reply.data == model[bounds(sector, sectors)], "{:?}", step);
                }
            }
            Step::Write {
                sector,
                sectors,
                seed,
                cuts,
            } => {
                let data = pattern(seed, sectors as usize * 512);
                let reply = transfer(guest, OUT, sector, &data, sectors * 512, &cuts);
                prop_assert_eq!(reply.status, expected(sector, sectors));
                if reply.status == OK {
                    model[bounds(sector, sectors)].copy_from_slice(&data);
                }
            }
            Step::Zero {
                sector,
                sectors,
                unmap,
            } => {
                let payload = Guest::range(sector, sectors, unmap.into());
                let status = guest.ask(WRITE_ZEROES, 0, &payload, 0).status;
                prop_assert_eq!(status, expected(sector, sectors));
                if status == OK {
                    model[bounds(sector, sectors)].fill(0);
                }
            }
            Step::Discard { sector, sectors } => {
                let payload = Guest::range(sector, sectors, 0);
                let status = guest.ask(DISCARD, 0, &payload, 0).status;
                prop_assert_eq!(status, expected(sector, sectors));
                // What a discarded range reads as is not said; on a file it is a hole.
                if status == OK {
                    model[bounds(sector, sectors)].fill(0);
                }
            }
            Step::Flush => prop_assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK),
            Step::Id => {
                prop_assert_eq!(&guest.ask(GET_ID, 0, &[], 20).data[..5], b"model");
            }
            Step::Cache(writeback) => {
                rig.block.write_config(32, &[writeback.into()]);
                prop_assert_eq!(rig.handle.writeback(), writeback);
            }
            Step::Resize(sectors) => {
                rig.handle.resize(sectors * 512).unwrap();
                model.resize(sectors as usize * 512, 0);
            }
            Step::Set(name, value) => {
                for thread in &rig.threads {
                    thread.remote().set(name, value).unwrap();
                }
            }
            Step::Reset => {
                rig.reset();
                rig.activate();
            }
            Step::Move => {
                home = 1 - home;
                let placement = Placement::single(rig.threads[home].remote(), 1);
                rig.handle.change_placement(placement).unwrap();
            }
        }
    }
    let bytes = model.len() as u32;
    let whole = rig.guests[0].read(0, bytes);
    prop_assert!(whole == model);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn io_uring_is_a_disk(steps in prop::collection::vec(step(), 1..60)) {
        run(EngineKind::IoUring, false, steps)?;
    }

    #[test]
    fn linux_aio_is_a_disk(steps in prop::collection::vec(step(), 1..60)) {
        run(EngineKind::Native, false, steps)?;
    }

    #[test]
    fn threads_are_a_disk(steps in prop::collection::vec(step(), 1..60)) {
        run(EngineKind::Threads, false, steps)?;
    }

    /// Cases 9 and 33: operations that are interrupted, refused for the moment or cut short anywhere
    /// make no difference.
    #[test]
    fn case_9_and_33_a_host_that_interrupts_and_shortens_is_a_disk(
        steps in prop::collection::vec(step(), 1..60),
        seed in any::<u64>(),
        direct in any::<bool>(),
    ) {
        use crate::virtio::block::engine::faults::{Fault, set_script};
        let unit = if direct { 512 } else { 1 };
        let id = format!("faulty-{direct}-{seed:x}");
        set_script(&id, std::sync::Arc::new(move |number, _| {
            let dice = seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            match dice % 5 {
                0 => Fault::Errno(libc::EINTR),
                1 => Fault::Errno(libc::EAGAIN),
                2 | 3 => Fault::Short((dice as usize / 8 % 3000 + 1) * unit),
                _ => Fault::None,
            }
        }));
        // None: O_DIRECT where it works; a whole number of blocks is right everywhere.
        let direct = if direct { None } else { Some(false) };
        let faulty = |options: Options| {
            let options = options.engine(EngineKind::IoUring);
            options.with(|d| (d.id, d.direct) = (id, direct))
        };
        run_with(faulty, false, steps)?;
    }

    #[test]
    fn registered_buffers_are_a_disk(
        steps in prop::collection::vec(step(), 1..60),
        direct in any::<bool>(),
        strict in any::<bool>(),
    ) {
        let direct = if direct { None } else { Some(false) };
        run_with(|options| options.fixedbufs().with(|d| d.direct = direct), strict, steps)?;
    }

    #[test]
    fn large_host_blocks_are_a_disk(steps in prop::collection::vec(step(), 1..60)) {
        run(EngineKind::IoUring, true, steps)?;
    }
}
