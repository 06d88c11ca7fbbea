//! The rules that are broken, one a case.

use crate::cpu;
use crate::phys;
use crate::unit::{INDIRECT, NEXT, WRITE, write_descriptor};
use crate::virtio::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, F_INDIRECT, F_RO, FEATURES_OK, Rings, T_DISCARD, T_FLUSH,
    T_GET_ID, T_IN, T_OUT, T_WRITE_ZEROES,
};

use super::Sort;
use super::raw::{QUEUE_SIZE, Raw, SECTOR};

pub struct Case {
    pub name: &'static str,
    pub sort: Sort,
    pub attack: fn(&mut Raw),
}

/// An address where no machine has memory or a device, within every processor's width.
const NOWHERE: u64 = 0x3f_ffff_f000;
/// Registers of the I/O APIC: no memory.
const DEVICE_MEMORY: u64 = 0xfec0_0000;
/// Where the data of a very large request lies: RAM, as far as there is any.
const BIG: u64 = 0x10_0000;

macro_rules! cases {
    ($($sort:ident $name:ident $attack:expr;)*) => {
        pub static ALL: &[Case] = &[$(Case { name: stringify!($name), sort: Sort::$sort, attack: $attack }),*];
    };
}

cases! {
    // The available ring.
    Request avail_jump |raw| { fill_ring(raw); jump(raw, QUEUE_SIZE + 1) };
    Request avail_jump_far |raw| { fill_ring(raw); jump(raw, 0x8000) };
    Request avail_back |raw| jump(raw, u16::MAX);
    Request head_out_of_range |raw| { raw.build(0, T_IN, 0, SECTOR); raw.offer(QUEUE_SIZE); raw.kick() };
    Request head_far_out_of_range |raw| { raw.build(0, T_IN, 0, SECTOR); raw.offer(0xffff); raw.kick() };
    Request same_head_many_times |raw| {
        raw.build(0, T_IN, 0, SECTOR);
        (0..QUEUE_SIZE).for_each(|_| raw.offer(0));
        raw.wanted_answers = usize::from(QUEUE_SIZE);
        raw.kick();
    };
    Silent kick_without_requests |raw| (0..200).for_each(|_| raw.kick());
    Silent kick_of_no_queue |raw| {
        for queue in [1, 7, 0x7fff, 0xffff] {
            let real = raw.disk.doorbell(0, false);
            real.with_value(queue).ring();
        }
    };

    // Chains.
    Request loop_of_two |raw| {
        raw.build(0, T_IN, 0, SECTOR);
        raw.desc(1, raw.data, SECTOR, NEXT | WRITE, 2);
        raw.desc(2, raw.status(0), 1, NEXT | WRITE, 1);
        send(raw);
    };
    Request loop_to_itself |raw| { raw.set_header(0, T_IN, 0); raw.desc(0, raw.header(0), 16, NEXT, 0); send(raw) };
    Request next_out_of_range |raw| {
        raw.build(0, T_IN, 0, SECTOR);
        raw.desc(1, raw.data, SECTOR, NEXT | WRITE, QUEUE_SIZE);
        send(raw);
    };
    Request chain_of_4_gib |raw| {
        // 2^32 bytes and a sector: a 32-bit sum is one sector.
        big_indirect(raw, Some(SECTOR));
        send(raw);
    };
    Request chain_of_4_gib_exactly |raw| { big_indirect(raw, None); send(raw) };
    Request chain_longer_than_queue |raw| {
        raw.set_header(0, T_IN, 0);
        let count = 1000;
        table(raw, 0, raw.header(0), 16, 0);
        for i in 1..count - 1 {
            table(raw, i, raw.data, 1, WRITE);
        }
        table(raw, count - 1, raw.status(0), 1, WRITE);
        finish_table(raw, count);
        send(raw);
    };
    Request data_of_length_zero |raw| { raw.put_read(0, 0); raw.kick() };
    Request descriptor_of_length_zero |raw| {
        raw.build(0, T_IN, 0, SECTOR);
        raw.desc(2, raw.data, 0, NEXT | WRITE, 3);
        raw.desc(3, raw.status(0), 1, WRITE, 0);
        send(raw);
    };
    Request only_an_empty_descriptor |raw| { raw.desc(0, raw.data, 0, 0, 0); send(raw) };

    // Indirect tables.
    Request indirect_in_indirect |raw| {
        good_table(raw);
        table(raw, 1, raw.table + 64, 32, INDIRECT);
        finish_table(raw, 3);
        send(raw);
    };
    Request indirect_and_next |raw| {
        good_table(raw);
        raw.desc(0, raw.table, 48, INDIRECT | NEXT, 1);
        raw.desc(1, raw.data, SECTOR, WRITE, 0);
        send(raw);
    };
    Request indirect_not_negotiated |raw| {
        raw.features &= !F_INDIRECT;
        raw.start();
        good_table(raw);
        send(raw);
        raw.features |= raw.disk.features & F_INDIRECT;
    };
    Request indirect_of_odd_length |raw| { good_table(raw); raw.desc(0, raw.table, 40, INDIRECT, 0); send(raw) };
    Request indirect_of_length_zero |raw| { good_table(raw); raw.desc(0, raw.table, 0, INDIRECT, 0); send(raw) };
    Request indirect_of_4_gib |raw| { good_table(raw); raw.desc(0, raw.table, 0xffff_fff0, INDIRECT, 0); send(raw) };
    Request indirect_outside_memory |raw| { raw.desc(0, NOWHERE, 48, INDIRECT, 0); send(raw) };
    Request indirect_loop |raw| {
        good_table(raw);
        write_descriptor(raw.table, 1, raw.data, SECTOR, NEXT | WRITE, 1);
        send(raw);
    };
    Request indirect_next_out_of_range |raw| {
        good_table(raw);
        write_descriptor(raw.table, 1, raw.data, SECTOR, NEXT | WRITE, 3);
        send(raw);
    };

    // Addresses.
    Request data_outside_memory |raw| with_data(raw, T_IN, NOWHERE, SECTOR);
    Request data_outside_memory_write |raw| with_data(raw, T_OUT, NOWHERE, SECTOR);
    Request data_wraps |raw| with_data(raw, T_IN, u64::MAX - 255, SECTOR);
    Request data_in_device_memory |raw| with_data(raw, T_IN, DEVICE_MEMORY, SECTOR);
    Request data_across_the_end_of_memory |raw| {
        let end = last_ram(raw);
        with_data(raw, T_IN, end - 256, SECTOR);
    };
    Request header_outside_memory |raw| { raw.build(0, T_IN, 0, SECTOR); raw.desc(0, NOWHERE, 16, NEXT, 1); send(raw) };
    Request status_outside_memory |raw| { raw.build(0, T_IN, 0, SECTOR); raw.desc(2, NOWHERE, 1, WRITE, 0); send(raw) };

    // Layout of a request.
    Request status_not_writable |raw| {
        raw.build(0, T_OUT, last_sector(raw), SECTOR);
        raw.desc(2, raw.status(0), 1, 0, 0);
        send(raw);
    };
    Request no_status |raw| { raw.set_header(0, T_FLUSH, 0); raw.desc(0, raw.header(0), 16, 0, 0); send(raw) };
    Request header_short |raw| { raw.build(0, T_IN, 0, SECTOR); raw.desc(0, raw.header(0), 8, NEXT, 1); send(raw) };
    Request header_writable |raw| { raw.build(0, T_IN, 0, SECTOR); raw.desc(0, raw.header(0), 16, NEXT | WRITE, 1); send(raw) };
    Request readable_after_writable |raw| {
        raw.build(0, T_IN, 0, SECTOR);
        raw.desc(2, raw.data + 4096, SECTOR, NEXT, 3);
        raw.desc(3, raw.status(0), 1, WRITE, 0);
        send(raw);
    };
    Request read_into_readable |raw| { raw.build(0, T_IN, 0, SECTOR); raw.desc(1, raw.data, SECTOR, NEXT, 2); send(raw) };
    Request write_from_writable |raw| {
        raw.build(0, T_OUT, last_sector(raw), SECTOR);
        raw.desc(1, raw.data, SECTOR, NEXT | WRITE, 2);
        send(raw);
    };

    // What is asked for.
    Request unknown_type |raw| request(raw, 0x55aa, 0, SECTOR);
    Request read_beyond_the_end |raw| request(raw, T_IN, last_sector(raw) + 1, SECTOR);
    Request write_beyond_the_end |raw| request(raw, T_OUT, last_sector(raw) + 1, SECTOR);
    Request read_across_the_end |raw| request(raw, T_IN, last_sector(raw), 2 * SECTOR);
    Request write_across_the_end |raw| request(raw, T_OUT, last_sector(raw), 2 * SECTOR);
    Request sector_overflows |raw| request(raw, T_IN, 1 << 55, SECTOR);
    Request sector_is_the_largest |raw| request(raw, T_OUT, u64::MAX, SECTOR);
    Request read_of_513_bytes |raw| request(raw, T_IN, 0, 513);
    Request write_of_511_bytes |raw| request(raw, T_OUT, last_sector(raw), 511);
    Request id_of_one_byte |raw| request(raw, T_GET_ID, 0, 1);
    Request id_without_data |raw| {
        raw.set_header(0, T_GET_ID, 0);
        raw.desc(0, raw.header(0), 16, NEXT, 1);
        raw.desc(1, raw.status(0), 1, WRITE, 0);
        send(raw);
    };
    Request discard_without_payload |raw| range(raw, T_DISCARD, 0, 0, 0, 0);
    Request discard_of_short_payload |raw| range(raw, T_DISCARD, 0, 8, 0, 8);
    Request discard_of_two_segments |raw| range(raw, T_DISCARD, 0, 8, 0, 32);
    Request discard_with_unmap |raw| range(raw, T_DISCARD, 0, 8, 1, 16);
    Request discard_with_unknown_flag |raw| range(raw, T_DISCARD, 0, 8, 0x80, 16);
    Request discard_too_large |raw| range(raw, T_DISCARD, 0, u32::MAX, 0, 16);
    Request discard_beyond_the_end |raw| range(raw, T_DISCARD, last_sector(raw), 8, 0, 16);
    Request discard_overflows |raw| range(raw, T_DISCARD, u64::MAX, 8, 0, 16);
    Request discard_of_nothing |raw| range(raw, T_DISCARD, 0, 0, 0, 16);
    Request zeroes_with_unknown_flag |raw| range(raw, T_WRITE_ZEROES, 0, 8, 0x80, 16);
    Request zeroes_too_large |raw| range(raw, T_WRITE_ZEROES, 0, u32::MAX, 0, 16);
    Request zeroes_beyond_the_end |raw| range(raw, T_WRITE_ZEROES, last_sector(raw), 8, 0, 16);
    Request zeroes_of_short_payload |raw| range(raw, T_WRITE_ZEROES, 0, 8, 0, 15);
    Request zeroes_of_nothing |raw| range(raw, T_WRITE_ZEROES, 0, 0, 0, 16);

    // Read-only disks.
    ReadOnly write_to_read_only |raw| request(raw, T_OUT, 0, SECTOR);
    ReadOnly write_to_read_only_not_acknowledged |raw| {
        raw.features &= !F_RO;
        raw.start();
        request(raw, T_OUT, 0, SECTOR);
        raw.features |= F_RO;
    };
    ReadOnly discard_on_read_only |raw| range(raw, T_DISCARD, 0, 8, 0, 16);
    ReadOnly zeroes_on_read_only |raw| range(raw, T_WRITE_ZEROES, 0, 8, 0, 16);
    ReadOnly flush_on_read_only |raw| {
        raw.set_header(0, T_FLUSH, 0);
        raw.desc(0, raw.header(0), 16, NEXT, 1);
        raw.desc(1, raw.status(0), 1, WRITE, 0);
        send(raw);
    };
    ReadOnly id_on_read_only |raw| request(raw, T_GET_ID, 0, 20);

    // Setting up.
    Silent queue_size_zero |raw| with_rings(raw, |rings| rings.size = 0);
    Silent queue_size_not_a_power_of_two |raw| with_rings(raw, |rings| rings.size = 48);
    Silent queue_size_too_large |raw| with_rings(raw, |rings| rings.size = 0x8000);
    Silent descriptors_unaligned |raw| with_rings(raw, |rings| rings.desc += 8);
    Silent available_unaligned |raw| with_rings(raw, |rings| rings.avail += 1);
    Silent used_unaligned |raw| with_rings(raw, |rings| rings.used += 2);
    Silent descriptors_outside_memory |raw| with_rings(raw, |rings| rings.desc = NOWHERE);
    Silent available_outside_memory |raw| with_rings(raw, |rings| rings.avail = NOWHERE);
    Silent used_outside_memory |raw| with_rings(raw, |rings| rings.used = NOWHERE);
    Silent used_in_device_memory |raw| with_rings(raw, |rings| rings.used = DEVICE_MEMORY);
    Silent used_across_the_end_of_memory |raw| {
        let end = last_ram(raw);
        with_rings(raw, |rings| rings.used = end - 256);
    };
    Silent descriptors_wrap |raw| with_rings(raw, |rings| rings.desc = !15);
    Silent rings_absent |raw| with_rings(raw, |rings| (rings.desc, rings.avail, rings.used) = (0, 0, 0));
    Silent rings_of_another_size_when_ready |raw| {
        let rings = raw.rings;
        raw.disk.set_up_queue(0, &Rings { size: 8, desc: NOWHERE, ..rings });
        raw.put_read(0, SECTOR);
        raw.kick();
    };
    Silent driver_ok_without_queues |raw| {
        raw.disk.negotiate(raw.features);
        raw.disk.driver_ok();
        raw.kick();
    };
    Silent driver_ok_without_features |raw| {
        raw.disk.reset();
        raw.disk.set_status(ACKNOWLEDGE | DRIVER | DRIVER_OK);
        raw.kick();
    };
    Silent kick_before_driver_ok |raw| {
        raw.disk.negotiate(raw.features);
        raw.clear_rings();
        let rings = raw.rings;
        raw.disk.set_up_queue(0, &rings);
        raw.put_read(0, SECTOR);
        raw.kick();
    };
    Silent features_not_offered |raw| {
        raw.disk.negotiate(u64::MAX);
        raw.disk.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        raw.kick();
    };
    Silent status_of_all_ones |raw| { raw.disk.set_status(0xff); raw.put_read(0, SECTOR); raw.kick() };
    Silent odd_register_accesses |raw| raw.disk.poke_registers();

    // Time.
    Silent reset_in_flight |raw| {
        for _ in 0..50 {
            raw.start();
            for head in (0..QUEUE_SIZE - 3).step_by(3) {
                raw.put(head, T_IN, 0, 2048);
            }
            raw.kick();
            raw.disk.reset();
            raw.guard();
            cpu::spin_ns(20_000);
            if !raw.is_guarded() {
                // Seen as a broken canary.
                raw.clear_rings();
                phys::fill(raw.data - 64, 0, 64);
                return;
            }
        }
        raw.clear_rings();
    };
    Silent descriptors_change_in_flight |raw| {
        for round in 0..2000u32 {
            for head in (0..QUEUE_SIZE - 3).step_by(3) {
                raw.build(head, T_IN, 0, SECTOR);
                raw.offer(head);
            }
            raw.kick();
            for i in 0..QUEUE_SIZE {
                let noise = round.wrapping_mul(0x9e37_79b9) ^ u32::from(i).wrapping_mul(0x85eb_ca6b);
                let addr = if noise & 8 == 0 { raw.data } else { NOWHERE };
                raw.desc(i, addr, noise & 0x1fff, (noise >> 16) as u16 & 7, noise as u16 % 80);
            }
            if round % 16 == 0 && raw.needs_reset() {
                return;
            }
        }
    };
}

fn last_sector(raw: &Raw) -> u64 {
    raw.disk.capacity_sectors - 1
}

/// The first address after the RAM that the rings are in.
fn last_ram(raw: &Raw) -> u64 {
    crate::memory::end_of_ram_at(raw.data)
}

/// Offers descriptor 0 and tells the device.
fn send(raw: &mut Raw) {
    raw.offer(0);
    raw.kick();
}

fn request(raw: &mut Raw, kind: u32, sector: u64, len: u32) {
    raw.put(0, kind, sector, len);
    raw.kick();
}

fn with_data(raw: &mut Raw, kind: u32, addr: u64, len: u32) {
    raw.build(0, kind, 0, len);
    let flags = if kind == T_IN { NEXT | WRITE } else { NEXT };
    raw.desc(1, addr, len, flags, 2);
    send(raw);
}

/// All entries of the available ring name the same good request.
fn fill_ring(raw: &mut Raw) {
    raw.build(0, T_IN, 0, SECTOR);
    phys::fill(raw.rings.avail + 4, 0, 2 * usize::from(QUEUE_SIZE));
}

fn jump(raw: &mut Raw, by: u16) {
    let index = raw.avail_idx.wrapping_add(by);
    raw.wanted_answers = usize::MAX;
    raw.set_avail(index);
    raw.kick();
}

/// Entry `number` of the indirect table, followed by the next.
fn table(raw: &Raw, number: u16, addr: u64, len: u32, flags: u16) {
    write_descriptor(raw.table, number, addr, len, flags | NEXT, number + 1);
}

/// Ends the table after `count` entries and lets descriptor 0 point to it.
fn finish_table(raw: &Raw, count: u16) {
    let last = raw.table + 16 * u64::from(count - 1) + 12;
    phys::write16(last, phys::read16(last) & !NEXT);
    raw.desc(0, raw.table, 16 * u32::from(count), INDIRECT, 0);
}

/// A read of one sector by an indirect table without fault.
fn good_table(raw: &Raw) {
    raw.set_header(0, T_IN, 0);
    table(raw, 0, raw.header(0), 16, 0);
    table(raw, 1, raw.data, SECTOR, WRITE);
    table(raw, 2, raw.status(0), 1, WRITE);
    finish_table(raw, 3);
}

/// A write of 4 GiB, and `more` bytes, by an indirect table of the same memory again and again. With
/// 129 MiB of memory the chain is no longer than the queue.
fn big_indirect(raw: &Raw, more: Option<u32>) {
    const FOUR_GIB: u64 = 1 << 32;
    let room = last_ram(raw) - BIG;
    let piece = (128 << 20).min(1 << room.ilog2());
    raw.set_header(0, T_OUT, 0);
    table(raw, 0, raw.header(0), 16, 0);
    let mut number = 1;
    for _ in 0..FOUR_GIB / piece {
        table(raw, number, BIG, piece as u32, 0);
        number += 1;
    }
    if let Some(len) = more {
        table(raw, number, raw.data, len, 0);
        number += 1;
    }
    table(raw, number, raw.status(0), 1, WRITE);
    finish_table(raw, number + 1);
}

/// A discard or write zeroes whose payload has `len` bytes.
fn range(raw: &mut Raw, kind: u32, sector: u64, sectors: u32, flags: u32, len: u32) {
    raw.set_header(0, kind, 0);
    for at in [raw.data, raw.data + 16] {
        phys::write64(at, sector);
        phys::write32(at + 8, sectors);
        phys::write32(at + 12, flags);
    }
    raw.desc(0, raw.header(0), 16, NEXT, if len == 0 { 2 } else { 1 });
    raw.desc(1, raw.data, len, NEXT, 2);
    raw.desc(2, raw.status(0), 1, WRITE, 0);
    send(raw);
}

/// Starts the device with rings that `change` has spoilt, then sends a good request.
fn with_rings(raw: &mut Raw, change: impl FnOnce(&mut Rings)) {
    let mut rings = raw.rings;
    change(&mut rings);
    raw.start_with(&rings);
    raw.put_read(0, SECTOR);
    raw.kick();
}
