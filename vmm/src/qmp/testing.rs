//! A machine for tests: real iothreads, and disks and vCPUs that are only told of.

use std::sync::Mutex;

use devices::virtio::block::BlockStats;
use iothread::{Context, ContextConfig, IoThread, IoThreadConfig};

use super::error::Error;
use super::event::{Event, ShutdownCause, Sink};
use super::machine::{
    Ability, DiskView, IoStatus, IoThreadView, MAIN_LOOP_ID, Machine, RunState, Vcpu,
};
use crate::config::{self, Cache};
use crate::trace::Tracer;

/// Everything is possible, unless `unable` says otherwise.
pub struct TestMachine {
    pub sink: Sink,
    pub unable: Vec<Ability>,
    pub state: Mutex<RunState>,
    pub iothreads: Mutex<Vec<IoThread>>,
    pub disks: Mutex<Vec<DiskView>>,
    pub tracer: Option<Tracer>,
    main: IoThreadView,
}

impl TestMachine {
    /// Two iothreads, `io0` and `io1`; `disk0` with two queues on them, `disk1` read-only on the main loop.
    pub fn new(sink: Sink) -> Self {
        let main = Context::new(ContextConfig::default()).unwrap();
        let machine = Self {
            sink,
            unable: Vec::new(),
            state: Mutex::new(RunState::Running),
            iothreads: Mutex::default(),
            disks: Mutex::new(vec![
                disk("disk0", false, &[Some("io0"), Some("io1")]),
                disk("disk1", true, &[None]),
            ]),
            tracer: None,
            main: IoThreadView {
                id: MAIN_LOOP_ID.to_owned(),
                thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
                remote: main.remote(),
            },
        };
        for id in ["io0", "io1"] {
            let config: config::IoThread =
                serde_json::from_value(serde_json::json!({"id": id})).unwrap();
            machine.add_iothread(&config).unwrap();
        }
        machine
    }
}

fn disk(id: &str, readonly: bool, queues: &[Option<&str>]) -> DiskView {
    DiskView {
        id: id.to_owned(),
        path: format!("/images/{id}.img").into(),
        readonly,
        direct: true,
        cache: Cache::Writeback,
        size_bytes: 10 << 20,
        queues: queues.iter().map(|id| id.map(str::to_owned)).collect(),
        io_status: IoStatus::Ok,
        stats: BlockStats {
            rd_operations: 3,
            rd_bytes: 4096,
            failed_rd_operations: 2,
            zeroes_bytes: 512,
            zeroes_operations: 1,
            wr_highest_offset: 77,
            ..BlockStats::default()
        },
    }
}

impl Machine for TestMachine {
    fn can(&self, ability: Ability) -> bool {
        !self.unable.contains(&ability)
    }

    fn run_state(&self) -> RunState {
        *self.state.lock().unwrap()
    }

    fn stop(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap();
        if *state == RunState::Running {
            *state = RunState::Paused;
            self.sink.emit(&Event::Stop);
        }
        Ok(())
    }

    fn cont(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap();
        if *state != RunState::Running {
            *state = RunState::Running;
            self.sink.emit(&Event::Resume);
        }
        Ok(())
    }

    fn powerdown(&self) -> Result<(), Error> {
        self.sink.emit(&Event::Powerdown);
        Ok(())
    }

    fn quit(&self) {
        self.sink.emit(&Event::Shutdown(ShutdownCause::HostQmpQuit));
    }

    fn vcpus(&self) -> Vec<Vcpu> {
        let vcpu = |index| Vcpu {
            index,
            thread_id: 1000,
        };
        (0..2).map(vcpu).collect()
    }

    fn iothreads(&self) -> Vec<IoThreadView> {
        let iothreads = self.iothreads.lock().unwrap();
        let view = |iothread: &IoThread| IoThreadView {
            id: iothread.id().to_owned(),
            thread_id: iothread.thread_id(),
            remote: iothread.remote().clone(),
        };
        iothreads.iter().map(view).collect()
    }

    fn main_loop(&self) -> Option<IoThreadView> {
        Some(self.main.clone())
    }

    fn tracer(&self) -> Option<&Tracer> {
        self.tracer.as_ref()
    }

    fn add_iothread(&self, config: &config::IoThread) -> Result<(), Error> {
        let iothread = IoThread::start(IoThreadConfig {
            id: config.id.clone(),
            context: ContextConfig {
                settings: crate::vm::iothreads::settings(config),
                ..ContextConfig::default()
            },
            ..IoThreadConfig::default()
        });
        let iothread = iothread.map_err(|error| Error::failed(error.to_string()))?;
        self.iothreads.lock().unwrap().push(iothread);
        Ok(())
    }

    fn remove_iothread(&self, id: &str) -> Result<(), Error> {
        let mut iothreads = self.iothreads.lock().unwrap();
        iothreads.retain(|iothread| iothread.id() != id);
        Ok(())
    }

    fn disks(&self) -> Vec<DiskView> {
        self.disks.lock().unwrap().clone()
    }

    fn resize_disk(&self, id: &str, size_bytes: u64) -> Result<(), Error> {
        let mut disks = self.disks.lock().unwrap();
        let disk = disks.iter_mut().find(|disk| disk.id == id).unwrap();
        disk.size_bytes = size_bytes;
        Ok(())
    }

    fn move_disk(&self, id: &str, iothread: Option<&str>) -> Result<(), Error> {
        let mut disks = self.disks.lock().unwrap();
        let disk = disks.iter_mut().find(|disk| disk.id == id).unwrap();
        disk.queues.fill(iothread.map(str::to_owned));
        Ok(())
    }
}
