//! Where devices on virtio-mmio lie, and how the guest is told.

use std::fmt::Write as _;

use arch::acpi::VirtioMmio;
use arch::layout::{DEVICE_GSI, VIRTIO_MMIO, VIRTIO_MMIO_SIZE_BYTES};

/// More devices than addresses.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "--disk: {given} disks on virtio-mmio, there is room for {most}; give fewer, or transport=pci"
)]
pub struct TooMany {
    /// Number given.
    given: usize,
    /// Number possible.
    most: usize,
}

/// Where a device on virtio-mmio is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Address of its registers.
    pub address: u64,
    /// Its interrupt.
    pub gsi: u32,
    /// Another device has the same interrupt.
    shared: bool,
}

impl Slot {
    /// Slots for `count` devices. Interrupts are dealt out in turn, so that they are shared only when there are more
    /// devices than pins.
    pub fn deal(count: usize) -> Result<Vec<Self>, TooMany> {
        let most = ((VIRTIO_MMIO.end - VIRTIO_MMIO.start) / VIRTIO_MMIO_SIZE_BYTES) as usize;
        if count > most {
            return Err(TooMany { given: count, most });
        }
        let pins = DEVICE_GSI.len();
        let addresses = (VIRTIO_MMIO.start..).step_by(VIRTIO_MMIO_SIZE_BYTES as usize);
        let slots = addresses.zip(DEVICE_GSI.cycle()).take(count).enumerate();
        Ok(slots
            .map(|(index, (address, gsi))| Self {
                address,
                gsi,
                shared: index + pins < count || index >= pins,
            })
            .collect())
    }

    /// The slot as ACPI announces it.
    pub fn acpi(&self) -> VirtioMmio {
        VirtioMmio {
            // Below 4 GiB, as the layout has it.
            address: self.address as u32,
            len_bytes: VIRTIO_MMIO_SIZE_BYTES as u32,
            gsi: self.gsi,
            shared: self.shared,
        }
    }
}

/// The slots as Linux takes them on its command line, where it has no ACPI.
pub fn cmdline(slots: &[Slot]) -> String {
    slots.iter().fold(String::new(), |mut text, slot| {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "virtio_mmio.device={}K@{:#x}:{} ",
            VIRTIO_MMIO_SIZE_BYTES >> 10,
            slot.address,
            slot.gsi
        );
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_shared_only_when_there_are_more_disks_than_pins() {
        let slots = Slot::deal(18).unwrap();
        assert!(slots.iter().all(|slot| !slot.shared));
        let gsis: std::collections::BTreeSet<u32> = slots.iter().map(|slot| slot.gsi).collect();
        assert_eq!(gsis.len(), 18);

        let slots = Slot::deal(20).unwrap();
        let shared: Vec<usize> = (0..20).filter(|at| slots[*at].shared).collect();
        assert_eq!(shared, [0, 1, 18, 19]);
        for slot in &slots {
            let same = slots.iter().filter(|other| other.gsi == slot.gsi).count();
            assert_eq!(slot.shared, same > 1);
        }
    }

    #[test]
    fn every_slot_has_its_own_address_and_there_is_an_end() {
        let slots = Slot::deal(256).unwrap();
        for pair in slots.windows(2) {
            assert_eq!(pair[1].address - pair[0].address, VIRTIO_MMIO_SIZE_BYTES);
        }
        assert!(slots[255].address < VIRTIO_MMIO.end);
        let error = Slot::deal(257).unwrap_err();
        assert!(error.to_string().contains("257 disks"));
    }

    #[test]
    fn the_command_line_announces_all() {
        let text = cmdline(&Slot::deal(2).unwrap());
        assert_eq!(
            text,
            "virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6 "
        );
    }
}
