//! A device that does nothing but remember, for tests of transports.

use std::sync::Arc;

use super::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice};
use super::features::{EVENT_IDX, VERSION_1};
use crate::sync::Mutex;

/// What happened to the device.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) accepted: Option<u64>,
    pub(crate) queues: Vec<ActiveQueue>,
    pub(crate) interrupt: Option<Arc<dyn Interrupt>>,
    pub(crate) activations: u32,
    pub(crate) resets: u32,
    pub(crate) fail: bool,
}

pub(crate) struct Dummy {
    pub(crate) log: Arc<Mutex<Log>>,
    pub(crate) config: [u8; 12],
}

pub(crate) const OFFERED: u64 = VERSION_1 | EVENT_IDX | 1 << 5;

impl Dummy {
    pub(crate) fn new() -> (Dummy, Arc<Mutex<Log>>) {
        let log = Arc::new(Mutex::new(Log::default()));
        let config = std::array::from_fn(|i| i as u8 + 1);
        (
            Dummy {
                log: log.clone(),
                config,
            },
            log,
        )
    }
}

impl VirtioDevice for Dummy {
    fn device_type(&self) -> u32 {
        2
    }
    fn name(&self) -> String {
        "dummy".into()
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn queue_max_sizes(&self) -> Vec<u16> {
        vec![256, 64]
    }
    fn config_generation(&self) -> u32 {
        7
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = usize::try_from(at)
                .ok()
                .and_then(|at| self.config.get(at))
                .copied()
                .unwrap_or(0);
        }
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(slot) = usize::try_from(at)
                .ok()
                .and_then(|at| self.config.get_mut(at))
            {
                *slot = *byte;
            }
        }
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut log = self.log.lock().unwrap();
        if log.fail {
            return Err(ActivateError("told to fail".into()));
        }
        log.activations += 1;
        log.accepted = Some(activation.features);
        log.queues = activation.queues;
        log.interrupt = Some(activation.interrupt);
        Ok(())
    }
    fn reset(&mut self) {
        let mut log = self.log.lock().unwrap();
        log.resets += 1;
        log.queues.clear();
        log.interrupt = None;
    }
}
