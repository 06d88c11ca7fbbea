//! A request's bytes cut over descriptors in any way: header, data and status, in one-byte pieces or
//! large ones, direct, indirect or both, on every engine and behind every transport. The result is
//! that of the same request in three descriptors.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::board::Wire;
use super::rig::*;
use crate::virtio::block::image::{Alignment, DEMANDED};
use crate::virtio::block::*;
use crate::virtio::testing::{INDIRECT, NEXT, WRITE};

/// How a chain is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Direct,
    Indirect,
    /// So many direct descriptors, then a table with the rest.
    Mixed(usize),
}

#[derive(Clone, Debug)]
struct Cut {
    sector: u64,
    sectors: u32,
    seed: u64,
    layout: Layout,
    // Lengths of the pieces of what the device reads, and of what it writes; the rest last.
    readable: Vec<u32>,
    writable: Vec<u32>,
}

const QUEUE: u16 = 256;
const SECTORS: u64 = 256;

fn lengths() -> impl Strategy<Value = Vec<u32>> {
    let length = prop_oneof![3 => Just(1u32), 2 => 1u32..20, 2 => 1u32..1500, 1 => Just(512)];
    // With the other half and the rests of both, fewer than the queue's size.
    prop::collection::vec(length, 0..100)
}

fn cut() -> impl Strategy<Value = Cut> {
    let layout = prop_oneof![
        Just(Layout::Direct),
        Just(Layout::Indirect),
        (1usize..6).prop_map(Layout::Mixed),
    ];
    let place = (0..SECTORS - 16, 1u32..16, any::<u64>());
    (place, layout, lengths(), lengths()).prop_map(
        |((sector, sectors, seed), layout, readable, writable)| Cut {
            sector,
            sectors,
            seed,
            layout,
            readable,
            writable,
        },
    )
}

/// Buffers for `bytes` bytes of guest memory, scattered.
fn buffers(guest: &mut Guest, bytes: u32, cuts: &[u32], writable: bool) -> Buffers {
    let mut left = bytes;
    let mut buffers = Vec::new();
    for &cut in cuts.iter().chain([&u32::MAX]) {
        let len = cut.min(left);
        if len > 0 {
            let at = guest.alloc(len.into(), u64::from(len) % 61);
            buffers.push((at, len, writable));
        }
        left -= len;
    }
    buffers
}

/// Makes a chain of `all` available as `layout` says.
fn offer(guest: &mut Guest, layout: Layout, all: &Buffers) -> u16 {
    if layout == Layout::Indirect {
        return guest.offer(all);
    }
    let direct = match layout {
        Layout::Mixed(count) => count.min(all.len() - 1),
        _ => all.len(),
    };
    // Descriptors from 0 on: one request at a time.
    for (i, &(addr, len, writable)) in (0u16..).zip(&all[..direct]) {
        let last = usize::from(i) + 1 == all.len();
        let flags = if writable { WRITE } else { 0 } | if last { 0 } else { NEXT };
        guest.ring.desc(i, addr, len, flags, i + 1);
    }
    if direct < all.len() {
        let table = guest.alloc(16 * (all.len() - direct) as u64, 0);
        guest.ring.chain_at(table, 0, &all[direct..]);
        let bytes = 16 * (all.len() - direct) as u32;
        guest.ring.desc(direct as u16, table, bytes, INDIRECT, 0);
    }
    guest.offer_head(0, all)
}

fn check(rig: &mut Rig, model: &mut [u8], cut: &Cut) -> Result<(), TestCaseError> {
    let guest = &mut rig.guests[0];
    let bytes = cut.sectors * 512;
    let (start, end) = (
        cut.sector as usize * 512,
        cut.sector as usize * 512 + bytes as usize,
    );
    let data = pattern(cut.seed, bytes as usize);
    for request in [OUT, IN] {
        guest.recycle();
        let mut output = Guest::header(request, cut.sector).to_vec();
        let mut input = 1;
        if request == OUT {
            output.extend(&data);
            model[start..end].copy_from_slice(&data);
        } else {
            input += bytes;
        }
        let mut all = buffers(guest, output.len() as u32, &cut.readable, false);
        let mut at = 0;
        for &(addr, len, _) in &all {
            let piece = &output[at..at + len as usize];
            let memory = &guest.ring.mem;
            memory.write_slice(piece, GuestAddress(addr)).unwrap();
            at += len as usize;
        }
        all.extend(buffers(guest, input, &cut.writable, true));
        let head = offer(guest, cut.layout, &all);
        guest.kick();
        let reply = guest.wait(head);
        prop_assert_eq!((reply.status, reply.written), (OK, input));
        if request == IN {
            prop_assert!(reply.data == data);
        }
    }
    prop_assert!(guest.read(0, SECTORS as u32 * 512) == *model);
    Ok(())
}

fn run(engine: EngineKind, cuts: Vec<(Wire, bool, Cut)>) -> Result<(), TestCaseError> {
    run_with(|options| options.engine(engine), cuts)
}

fn run_with(
    change: impl Fn(Options) -> Options,
    cuts: Vec<(Wire, bool, Cut)>,
) -> Result<(), TestCaseError> {
    // One disk for each of these, as a case uses it.
    let mut rigs: Vec<(Wire, bool, Rig, Vec<u8>, tempfile::NamedTempFile)> = Vec::new();
    for (wire, strict, cut) in cuts {
        let found = rigs.iter().position(|r| r.0 == wire && r.1 == strict);
        let index = found.unwrap_or_else(|| {
            let file = image(SECTORS * 512);
            let mut options = change(Options::new(file.path()));
            options.disk.queue_size = QUEUE;
            options.wire = wire;
            if strict {
                DEMANDED.set(Some(Alignment {
                    memory: 512,
                    offset: 4096,
                }));
            }
            let rig = Rig::new(options);
            DEMANDED.set(None);
            rigs.push((wire, strict, rig, vec![0; SECTORS as usize * 512], file));
            rigs.len() - 1
        });
        let (_, _, rig, model, _) = &mut rigs[index];
        check(rig, model, &cut)?;
    }
    Ok(())
}

fn cuts() -> impl Strategy<Value = Vec<(Wire, bool, Cut)>> {
    let wire = prop::sample::select(Wire::ALL.to_vec());
    prop::collection::vec((wire, any::<bool>(), cut()), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn any_cutting_is_the_same_request_on_io_uring(cuts in cuts()) {
        run(EngineKind::IoUring, cuts)?;
    }

    #[test]
    fn any_cutting_is_the_same_request_in_registered_buffers(cuts in cuts()) {
        run_with(Options::fixedbufs, cuts)?;
    }

    #[test]
    fn any_cutting_is_the_same_request_on_linux_aio(cuts in cuts()) {
        run(EngineKind::Native, cuts)?;
    }

    #[test]
    fn any_cutting_is_the_same_request_on_threads(cuts in cuts()) {
        run(EngineKind::Threads, cuts)?;
    }
}
