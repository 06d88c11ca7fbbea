//! Where memory is: s390x guests have it in one piece from address 0 on.

use vm_memory::GuestAddress;

/// KVM takes memory in whole segments (Documentation/virt/kvm/api.rst, KVM_SET_USER_MEMORY_REGION).
pub const SEGMENT_BYTES: u64 = 1 << 20;

/// Guest memory of `size_bytes`, rounded down to whole segments.
pub fn memory_regions(size_bytes: u64) -> Vec<(GuestAddress, usize)> {
    let size_bytes = size_bytes / SEGMENT_BYTES * SEGMENT_BYTES;
    // A size that no address space holds is refused when it is mapped.
    vec![(
        GuestAddress(0),
        usize::try_from(size_bytes).unwrap_or(usize::MAX),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_one_piece_of_whole_segments() {
        assert_eq!(memory_regions(5 << 20), [(GuestAddress(0), 5 << 20)]);
        assert_eq!(
            memory_regions((5 << 20) + 4096),
            [(GuestAddress(0), 5 << 20)]
        );
    }
}
