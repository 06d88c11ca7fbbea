use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use super::*;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Rig {
    sclp: Sclp,
    sink: Sink,
    rooms: Arc<AtomicU32>,
}

fn rig(memory_bytes: u64, cpus: u16) -> Rig {
    let sink = Sink::default();
    let rooms = Arc::new(AtomicU32::new(0));
    let counter = rooms.clone();
    let sclp = Sclp::new(
        Inventory { memory_bytes, cpus },
        Box::new(sink.clone()),
        Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }),
    );
    Rig { sclp, sink, rooms }
}

fn block(len: usize) -> Vec<u8> {
    let mut sccb = vec![0; len];
    put16(&mut sccb, 0, len as u16);
    sccb
}

fn response(sccb: &[u8]) -> u16 {
    get16(sccb, 6).unwrap()
}

fn listen(sclp: &Sclp, receive: u32) -> Vec<u8> {
    let mut sccb = block(28);
    put16(&mut sccb, 10, 4);
    sccb[12..16].copy_from_slice(&receive.to_be_bytes());
    sclp.call(0x0078_0005, &mut sccb);
    assert_eq!(response(&sccb), 0x0020);
    sccb
}

#[test]
fn what_the_machine_has() {
    for (bytes, short, long) in [
        (512 << 20, 512, 0),
        (65535 << 20, 65535, 0),
        (128 << 30, 0, 128 << 10),
    ] {
        let mut sccb = block(4096);
        rig(bytes, 3).sclp.call(0x0002_0001, &mut sccb);
        assert_eq!(response(&sccb), 0x0010);
        assert_eq!((get16(&sccb, 8), sccb[10]), (Some(short), 1));
        assert_eq!(sccb[104..112], u64::to_be_bytes(long));
        assert_eq!((get16(&sccb, 16), get16(&sccb, 18)), (Some(3), Some(128)));
        assert_eq!((sccb[128], sccb[144], sccb[160]), (0, 1, 2));
    }
    let mut sccb = block(4096);
    rig(1 << 20, 3).sclp.call(0x0001_0001, &mut sccb);
    assert_eq!(response(&sccb), 0x0010);
    assert_eq!(&sccb[8..16], [0, 3, 0, 24, 0, 0, 0, 72]);
    assert_eq!(sccb[24 + 16], 1);
}

#[test]
fn every_command_with_blocks_too_short() {
    let rig = rig(1 << 30, 200);
    for (command, len, expected) in [
        (0x0002_0001, 8, 0x0300),
        (0x0012_0001, 127, 0x0300),
        (0x0002_0001, 128, 0x0300),
        (0x0001_0001, 23, 0x0300),
        (0x0001_0001, 24, 0x0300),
        (0x0078_0005, 8, 0x0300),
        (0x0078_0005, 12, 0x74f0),
        (0x0076_0005, 8, 0x60f0),
        (0x0076_0005, 10, 0x72f0),
        (0x0077_0005, 8, 0x60f0),
        (0x0000_0000, 8, 0x01f0),
        (0x0022_0011, 4096, 0x01f0),
    ] {
        let mut sccb = block(len);
        rig.sclp.call(command, &mut sccb);
        assert_eq!(response(&sccb), expected, "{command:#x} {len}");
    }
}

#[test]
fn masks_of_any_length() {
    let sclp = rig(1 << 30, 1).sclp;
    let sccb = listen(&sclp, 0xffff_ffff);
    assert_eq!(&sccb[20..28], [0, 0, 0, 0x40, 0, 0, 0, 0x48]);
    for (len, expected) in [(0, 0x74f0), (1022, 0x74f0), (5, 0x0300)] {
        let mut sccb = block(28);
        put16(&mut sccb, 10, len);
        sclp.call(0x0078_0005, &mut sccb);
        assert_eq!(response(&sccb), expected, "{len}");
    }
    let mut sccb = block(16);
    put16(&mut sccb, 10, 1);
    sclp.call(0x0078_0005, &mut sccb);
    assert_eq!(response(&sccb), 0x0020);
}

#[test]
fn output_is_what_the_guest_writes() {
    let rig = rig(1 << 30, 1);
    let mut sccb = block(8);
    for text in [&b"hello "[..], b"world"] {
        let mut event = vec![0; 6];
        put16(&mut event, 0, 6 + text.len() as u16);
        event[2] = 0x1a;
        event.extend(text);
        sccb.extend(event);
    }
    rig.sclp.call(0x0076_0005, &mut sccb);
    assert_eq!(response(&sccb), 0x0020);
    assert_eq!(sccb[8 + 3], 0x80, "accepted");
    assert_eq!(*rig.sink.0.lock().unwrap(), b"hello world");
    // Another type, a length beyond the block, one too short, a function that is none.
    for (len, kind, function, expected) in [
        (8, 2, 0, 0x73f0),
        (9, 0x1a, 0, 0x72f0),
        (5, 0x1a, 0, 0x72f0),
        (8, 0x1a, 1, 0x40f0),
    ] {
        let mut sccb = block(16);
        sccb[2] = function;
        put16(&mut sccb, 8, len);
        sccb[10] = kind;
        rig.sclp.call(0x0076_0005, &mut sccb);
        assert_eq!(response(&sccb), expected, "{len} {kind} {function}");
    }
}

#[test]
fn input_waits_for_a_guest_that_listens_and_for_room() {
    let rig = rig(1 << 30, 1);
    assert_eq!(rig.sclp.input(b"early"), 0);
    listen(&rig.sclp, 0x40);
    assert_eq!(rig.rooms.load(Ordering::Relaxed), 1);
    assert_eq!(rig.sclp.pending(), 0);
    assert_eq!(rig.sclp.input(b"typed"), 5);
    assert_eq!(rig.sclp.pending(), 1);
    let mut sccb = block(4096);
    sccb[5] = 0x80;
    rig.sclp.call(0x0077_0005, &mut sccb);
    assert_eq!(response(&sccb), 0x0020);
    assert_eq!(get16(&sccb, 0), Some(8 + 6 + 1 + 5));
    assert_eq!(&sccb[8..20], b"\0\x0c\x1a\0\0\0\0typed");
    assert_eq!(rig.sclp.pending(), 0);
    assert_eq!(rig.sclp.input(&[1; 5000]), 4096);
    let mut small = block(20);
    rig.sclp.call(0x0077_0005, &mut small);
    assert_eq!(response(&small), 0x0020);
    assert_eq!(rig.rooms.load(Ordering::Relaxed), 2);
    // Too small for a byte.
    let mut tiny = block(14);
    rig.sclp.call(0x0077_0005, &mut tiny);
    assert_eq!(response(&tiny), 0x0300);
    // Selected events, of which there are none.
    let mut selective = block(32);
    selective[2] = 0x80;
    put16(&mut selective, 10, 4);
    rig.sclp.call(0x0077_0005, &mut selective);
    assert_eq!(response(&selective), 0x60f0);
    put16(&mut selective, 10, 100);
    rig.sclp.call(0x0077_0005, &mut selective);
    assert_eq!(response(&selective), 0x0300);
    selective[2] = 7;
    rig.sclp.call(0x0077_0005, &mut selective);
    assert_eq!(response(&selective), 0x40f0);
}

#[test]
fn a_guest_is_asked_to_shut_down_if_it_listens() {
    let rig = rig(1 << 30, 1);
    assert!(!rig.sclp.quiesce());
    listen(&rig.sclp, 0x08);
    assert!(rig.sclp.quiesce());
    assert_eq!(rig.sclp.pending(), 1);
    let mut sccb = block(64);
    rig.sclp.call(0x0077_0005, &mut sccb);
    assert_eq!(&sccb[8..17], [0, 9, 0x1d, 0, 0, 0, 0xff, 0xff, 0]);
    assert_eq!(rig.sclp.pending(), 0);
    rig.sclp.reset();
    assert!(!rig.sclp.quiesce());
}

proptest! {
    #[test]
    fn no_block_makes_it_panic(
        command in prop::sample::select(vec![
            0x0001_0001u32, 0x0002_0001, 0x0076_0005, 0x0077_0005, 0x0078_0005, 0x0012_0001,
        ]),
        bytes in prop::collection::vec(any::<u8>(), 8..200),
        input in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let rig = rig(1 << 30, 4);
        listen(&rig.sclp, u32::MAX);
        rig.sclp.input(&input);
        rig.sclp.quiesce();
        let mut sccb = bytes;
        rig.sclp.call(command, &mut sccb);
    }
}
