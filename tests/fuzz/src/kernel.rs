//! Kernel files of any content.

use std::cell::RefCell;

use arch::kernel::load_images;
use arch::{BootConfig, memory_regions};
use devices::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};

const MEMORY_BYTES: u64 = 96 << 20;
/// Places at which a refused file would leave traces.
const MARKS: u64 = 64 << 10;
const MARK: u64 = 0x5a5a_5a5a_a5a5_a5a5;

fn marked() -> GuestMemory {
    let memory = GuestMemory::from_ranges(&memory_regions(MEMORY_BYTES)).unwrap();
    for at in marks(&memory) {
        memory.write_obj(MARK, at).unwrap();
    }
    memory
}

fn marks(memory: &GuestMemory) -> impl Iterator<Item = GuestAddress> {
    let places = (0..MEMORY_BYTES).step_by(MARKS as usize).map(GuestAddress);
    places.filter(|at| memory.check_range(*at, 8))
}

/// The target: the last byte says how many bytes before it are the initrd, the rest is the kernel.
pub fn load(input: &[u8]) {
    thread_local! {
        static MEMORY: RefCell<GuestMemory> = RefCell::new(marked());
    }
    let (kernel, initrd) = match input.split_last() {
        Some((cut, rest)) => rest.split_at(rest.len() - rest.len().min(usize::from(*cut))),
        None => (input, input),
    };
    MEMORY.with_borrow_mut(|memory| {
        let initrd = Some(initrd).filter(|initrd| !initrd.is_empty());
        let config = BootConfig {
            rsdp: Some(0xe_0000),
            reserved: Vec::new(),
        };
        match load_images(memory, kernel, initrd, b"console=ttyS0", &config) {
            Ok(boot) => {
                assert!(
                    memory.address_in_range(GuestAddress(boot.entry)),
                    "{boot:?}"
                );
                assert!(boot.kernel.contains(&boot.entry), "{boot:?}");
                *memory = marked();
            }
            Err(error) => {
                let text = error.to_string();
                assert!(!text.contains('\n'), "one line: {text}");
                for at in marks(memory) {
                    let found: u64 = memory.read_obj(at).unwrap();
                    assert_eq!(found, MARK, "refused and yet written at {at:?}: {text}");
                }
            }
        }
    });
}
