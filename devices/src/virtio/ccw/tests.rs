use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::command::*;
use super::*;
use crate::channel::format::{Orb, Pmcw, Schib};
use crate::channel::testing::{Event, Recorder};
use crate::channel::{ChannelSubsystem, SubchannelId};
use crate::virtio::features::VERSION_1;
use crate::virtio::testing_device::{Dummy, Log, OFFERED};

const DATA: u64 = 0x3000;
const REJECT: u8 = 0x80;

struct Rig {
    mem: GuestMemory,
    css: ChannelSubsystem,
    id: SubchannelId,
    unit: Arc<VirtioCcw>,
    log: Arc<crate::sync::Mutex<Log>>,
    recorder: Arc<Recorder>,
}

impl Rig {
    fn with_host(host: Box<dyn CcwHost>) -> Self {
        let mem = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let recorder = Arc::new(Recorder::default());
        let mut css = ChannelSubsystem::new(mem.clone(), recorder.clone());
        let (device, log) = Dummy::new();
        let unit = Arc::new(VirtioCcw::new(Box::new(device), mem.clone(), host).unwrap());
        let attention = css.add(unit.clone()).unwrap();
        let id = attention.id();
        unit.connect(attention);
        let rig = Self {
            mem,
            css,
            id,
            unit,
            log,
            recorder,
        };
        rig.enable(true);
        rig
    }

    fn new() -> Self {
        let rig = Self::with_host(Box::new(NoIrqfds));
        assert_eq!(rig.send(SET_VIRTIO_REV, &[0, 2, 0, 0]), Ok(()));
        rig
    }

    fn enable(&self, on: bool) {
        let mut schib = Schib::parse(&self.css.store(self.id).unwrap()).unwrap();
        schib.pmcw.flags = if on { Pmcw::ENABLED } else { 0 };
        schib.pmcw.characteristics = Pmcw::CONCURRENT_SENSE;
        assert_eq!(self.css.modify(self.id, &schib), 0);
    }

    /// Runs one command; an error is sense byte 0, or the subchannel's status.
    fn command(&self, code: u8, flags: u8, count: u16, address: u32) -> Result<(), u8> {
        let mut ccw = [code, flags, 0, 0, 0, 0, 0, 0];
        ccw[2..4].copy_from_slice(&count.to_be_bytes());
        ccw[4..].copy_from_slice(&address.to_be_bytes());
        self.mem.write_obj(ccw, GuestAddress(0x2000)).unwrap();
        let orb = Orb {
            parameter: 0,
            flags: Orb::FORMAT_1,
            path_mask: 0x80,
            program: 0x2000,
        };
        assert_eq!(self.css.start(self.id, &orb), 0);
        let mut irb = [0; 64];
        let cc = self.css.test(self.id, |stored| {
            irb = *stored;
            Ok(())
        });
        assert_eq!(cc, Ok(0));
        match (irb[8], irb[9]) {
            (0x0c, 0) => Ok(()),
            (0x02, 0) => Err(irb[32]),
            (_, status) => Err(status),
        }
    }

    fn send(&self, code: u8, data: &[u8]) -> Result<(), u8> {
        self.mem.write_slice(data, GuestAddress(DATA)).unwrap();
        self.command(code, 0, data.len() as u16, DATA as u32)
    }

    fn data<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.mem.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
        bytes
    }

    fn status(&self) -> u8 {
        self.send(READ_STATUS, &[0xee]).unwrap();
        self.data::<1>()[0]
    }

    fn set_queue(&self, desc: u64, index: u16, size: u16) -> Result<(), u8> {
        let mut block = [0; 32];
        block[0..8].copy_from_slice(&desc.to_be_bytes());
        block[12..14].copy_from_slice(&index.to_be_bytes());
        block[14..16].copy_from_slice(&size.to_be_bytes());
        block[16..24].copy_from_slice(&0x1_1000u64.to_be_bytes());
        block[24..32].copy_from_slice(&0x1_2000u64.to_be_bytes());
        self.send(SET_VQ, &block)
    }

    fn accept(&self, features: u64) {
        for (index, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            let mut block = [0; 5];
            block[..4].copy_from_slice(&half.to_le_bytes());
            block[4] = index;
            self.send(WRITE_FEAT, &block).unwrap();
        }
    }

    fn activate(&self) {
        self.accept(VERSION_1);
        self.set_queue(0x1_0000, 0, 16).unwrap();
        for status in [1, 3, 11, 15] {
            self.send(WRITE_STATUS, &[status]).unwrap();
        }
    }

    fn interrupt(&self) -> Arc<dyn crate::virtio::device::Interrupt> {
        self.log.lock().unwrap().interrupt.clone().unwrap()
    }

    fn byte(&self, address: u64) -> u8 {
        self.mem.read_obj(GuestAddress(address)).unwrap()
    }
}

#[test]
fn revisions() {
    let rig = Rig::with_host(Box::new(NoIrqfds));
    assert_eq!(rig.send(READ_STATUS, &[0]), Err(REJECT), "no revision yet");
    assert_eq!(rig.command(VDEV_RESET, 0, 0, 0), Ok(()));
    for bad in [&[0, 0, 0, 0][..], &[0, 3, 0, 0], &[0, 1, 0, 1, 9]] {
        assert_eq!(rig.send(SET_VIRTIO_REV, bad), Err(REJECT), "{bad:?}");
    }
    assert_eq!(
        rig.command(SET_VIRTIO_REV, 0x20, 3, DATA as u32),
        Err(REJECT)
    );
    assert_eq!(rig.send(SET_VIRTIO_REV, &[0, 1, 0, 0]), Ok(()));
    assert_eq!(
        rig.send(SET_VIRTIO_REV, &[0, 1, 0, 0]),
        Err(REJECT),
        "twice"
    );
    assert_eq!(
        rig.send(READ_STATUS, &[0]),
        Err(REJECT),
        "not in revision 1"
    );
    // A reset keeps it, another driver begins anew.
    assert_eq!(rig.command(VDEV_RESET, 0, 0, 0), Ok(()));
    assert_eq!(rig.send(SET_VIRTIO_REV, &[0, 2, 0, 0]), Err(REJECT));
    rig.enable(false);
    rig.enable(true);
    assert_eq!(rig.send(SET_VIRTIO_REV, &[0, 2, 0, 0]), Ok(()));
    assert_eq!(rig.status(), 0);
}

#[test]
fn every_command_with_data_too_short_too_long_and_nowhere() {
    let rig = Rig::new();
    for (code, len) in [
        (READ_FEAT, 5u16),
        (WRITE_FEAT, 5),
        (SET_VQ, 32),
        (READ_VQ_CONF, 4),
        (READ_STATUS, 1),
        (WRITE_STATUS, 1),
        (SET_IND, 8),
        (SET_CONF_IND, 8),
        (SET_IND_ADAPTER, 25),
    ] {
        let short = rig.command(code, 0, len - 1, DATA as u32);
        assert!(short.is_err(), "{code:#x} short");
        let suppressed = rig.command(code, 0x20, len - 1, DATA as u32);
        assert_eq!(suppressed, Err(REJECT), "{code:#x} short, suppressed");
        let nowhere = rig.command(code, 0, len, 0x0f_ffff);
        assert!(nowhere.is_err() || len == 1, "{code:#x} nowhere");
    }
    for code in [0x00, 0x40, 0x99, 0xfd] {
        assert!(
            rig.command(code, 0x20, 64, DATA as u32).is_err(),
            "{code:#x}"
        );
    }
}

#[test]
fn features_are_little_endian_and_negotiated_in_halves() {
    let rig = Rig::new();
    rig.send(READ_FEAT, &[0, 0, 0, 0, 0]).unwrap();
    assert_eq!(rig.data::<4>(), (OFFERED as u32).to_le_bytes());
    rig.send(READ_FEAT, &[0, 0, 0, 0, 1]).unwrap();
    assert_eq!(rig.data::<4>(), ((OFFERED >> 32) as u32).to_le_bytes());
    rig.send(READ_FEAT, &[9, 9, 9, 9, 200]).unwrap();
    assert_eq!(rig.data::<4>(), [0; 4]);
    // What was not offered is refused, in any half.
    for features in [VERSION_1 | 1, 1 << 5] {
        rig.send(WRITE_STATUS, &[0]).unwrap();
        rig.accept(features);
        rig.send(WRITE_STATUS, &[11]).unwrap();
        assert_eq!(rig.status() & 8, 0, "{features:#x}");
    }
    rig.send(WRITE_STATUS, &[0]).unwrap();
    rig.accept(VERSION_1);
    rig.send(WRITE_FEAT, &[1, 0, 0, 0, 7]).unwrap();
    rig.send(WRITE_STATUS, &[11]).unwrap();
    assert_eq!(rig.status() & 8, 0, "a half that is not there");
}

#[test]
fn queues_and_configuration() {
    let rig = Rig::new();
    for (index, size) in [(0u16, 256u16), (1, 64), (2, 0), (0xffff, 0)] {
        let [high, low] = index.to_be_bytes();
        rig.send(READ_VQ_CONF, &[high, low, 9, 9]).unwrap();
        let [a, b] = size.to_be_bytes();
        assert_eq!(rig.data::<4>(), [high, low, a, b]);
    }
    assert_eq!(rig.set_queue(0x1_0000, 2, 16), Err(REJECT));
    assert_eq!(rig.set_queue(0x1_0000, 0, 512), Err(REJECT));
    rig.send(READ_CONF, &[0; 12]).unwrap();
    assert_eq!(rig.data::<3>(), [1, 2, 3]);
    rig.send(WRITE_CONF, &[7; 12]).unwrap();
    rig.send(READ_CONF, &[0; 12]).unwrap();
    assert_eq!(rig.data::<12>(), [7; 12]);
    rig.activate();
    let log = rig.log.lock().unwrap();
    assert_eq!((log.activations, log.accepted), (1, Some(VERSION_1)));
    assert_eq!(log.queues.len(), 1);
    drop(log);
    assert_eq!(rig.set_queue(0x1_0000, 0, 16), Err(REJECT), "while active");
    assert_eq!(rig.status(), 15);
    // A queue that cannot be: the device waits for a reset.
    rig.send(WRITE_STATUS, &[0]).unwrap();
    rig.accept(VERSION_1);
    rig.set_queue(0xffff_ffff_0000, 0, 16).unwrap();
    rig.send(WRITE_STATUS, &[15]).unwrap();
    assert_eq!(rig.status() & 0x40, 0x40);
}

#[test]
fn kicks_reach_their_queue() {
    let rig = Rig::new();
    let kicks = rig.unit.queue_eventfds();
    assert_eq!(
        kicks.iter().map(|k| k.datamatch).collect::<Vec<_>>(),
        [0, 1]
    );
    assert!(rig.unit.notify(1));
    assert_eq!(kicks[1].eventfd.read().unwrap(), 1);
    for queue in [2, u64::from(u32::MAX) + 1, u64::MAX] {
        assert!(!rig.unit.notify(queue));
    }
}

#[test]
fn classic_indicators_are_bits_of_a_big_endian_word() {
    let rig = Rig::new();
    assert_eq!(rig.send(SET_IND, &u64::MAX.to_be_bytes()), Err(REJECT));
    assert_eq!(rig.send(SET_CONF_IND, &u64::MAX.to_be_bytes()), Err(REJECT));
    rig.send(SET_IND, &0x5000u64.to_be_bytes()).unwrap();
    rig.send(SET_CONF_IND, &0x5100u64.to_be_bytes()).unwrap();
    rig.activate();
    let interrupt = rig.interrupt();
    rig.recorder.take();
    interrupt.queue(0);
    interrupt.queue(9);
    interrupt.queue(64);
    assert_eq!((rig.byte(0x5007), rig.byte(0x5006)), (1, 2));
    assert_eq!(rig.recorder.take().len(), 1, "one status at a time");
    assert_eq!(rig.css.test(rig.id, |_| Ok(())), Ok(0));
    interrupt.config();
    assert_eq!(rig.byte(0x5107), 1);
    assert!(matches!(
        rig.recorder.take()[..],
        [Event::Withdrawn(_), Event::Subchannel(_)]
    ));
    assert_eq!(rig.css.test(rig.id, |_| Ok(())), Ok(0));
    interrupt.needs_reset();
    assert_eq!(rig.css.test(rig.id, |_| Ok(())), Ok(0));
    assert_eq!(rig.status() & 0x40, 0x40);
    // After a reset there are none.
    rig.command(VDEV_RESET, 0, 0, 0).unwrap();
    rig.mem.write_obj(0u8, GuestAddress(0x5007)).unwrap();
    interrupt.queue(0);
    assert_eq!(rig.byte(0x5007), 0);
}

fn adapter(summary: u64, indicators: u64, first_bit: u64, isc: u8) -> [u8; 25] {
    let mut block = [0; 25];
    block[0..8].copy_from_slice(&summary.to_be_bytes());
    block[8..16].copy_from_slice(&indicators.to_be_bytes());
    block[16..24].copy_from_slice(&first_bit.to_be_bytes());
    block[24] = isc;
    block
}

#[test]
fn adapter_indicators_have_one_interruption_for_a_summary() {
    let rig = Rig::new();
    for bad in [
        adapter(u64::MAX, 0x5000, 0, 1),
        adapter(0x5100, u64::MAX, 0, 1),
        adapter(0x5100, 0x5000, u64::MAX, 1),
        adapter(0x5100, 0x5000, 0, 8),
    ] {
        assert_eq!(rig.send(SET_IND_ADAPTER, &bad), Err(REJECT));
    }
    rig.send(SET_IND_ADAPTER, &adapter(0x5100, 0x5000, 6, 5))
        .unwrap();
    rig.activate();
    let interrupt = rig.interrupt();
    rig.recorder.take();
    interrupt.queue(0);
    interrupt.queue(2);
    assert_eq!((rig.byte(0x5000), rig.byte(0x5001)), (0x02, 0x80));
    assert_eq!(rig.byte(0x5100), 1);
    assert_eq!(rig.recorder.take(), [Event::Adapter(5)]);
    rig.mem.write_obj(0u8, GuestAddress(0x5100)).unwrap();
    interrupt.queue(1);
    assert_eq!(rig.recorder.take(), [Event::Adapter(5)]);
}

struct Routed(Arc<Mutex<Vec<Option<AdapterIndicators>>>>, Vec<EventFd>);

impl CcwHost for Routed {
    fn route(&self, at: AdapterIndicators) -> io::Result<Option<Vec<EventFd>>> {
        self.0.lock().unwrap().push(Some(at));
        if at.isc == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.1
            .iter()
            .map(EventFd::try_clone)
            .collect::<io::Result<_>>()
            .map(Some)
    }
    fn unroute(&self) {
        self.0.lock().unwrap().push(None);
    }
}

#[test]
fn with_irqfds_the_kernel_sets_the_indicators() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let fds: Vec<_> = (0..2).map(|_| EventFd::new(0).unwrap()).collect();
    let clones = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let rig = Rig::with_host(Box::new(Routed(calls.clone(), clones)));
    rig.send(SET_VIRTIO_REV, &[0, 2, 0, 0]).unwrap();
    rig.send(SET_IND_ADAPTER, &adapter(0x5100, 0x5000, 0, 5))
        .unwrap();
    rig.activate();
    rig.interrupt().queue(1);
    assert_eq!(fds[1].read().unwrap(), 1);
    assert_eq!(rig.byte(0x5000), 0);
    rig.command(VDEV_RESET, 0, 0, 0).unwrap();
    assert_eq!(calls.lock().unwrap().len(), 2);
    // Where the kernel takes no route, the device does it itself.
    rig.send(SET_IND_ADAPTER, &adapter(0x5100, 0x5000, 0, 0))
        .unwrap();
    rig.activate();
    rig.interrupt().queue(0);
    assert_eq!((rig.byte(0x5000), rig.byte(0x5100)), (0x80, 1));
}
