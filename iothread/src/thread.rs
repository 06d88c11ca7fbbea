//! A thread that runs one loop: an iothread.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use crate::context::{Context, ContextConfig};
use crate::error::Error;
use crate::remote::Remote;
use crate::ring::TaskRun;

/// Called in the thread that has panicked, with the iothread's id and the panic's message, before
/// the thread ends. Its loop will not run again.
pub type OnPanic = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// How an [`IoThread`] is to be.
#[derive(Clone, Default)]
pub struct IoThreadConfig {
    /// Its id; the thread is called `IO <id>`, of which the system keeps 15 bytes.
    pub id: String,
    /// The CPUs it is bound to; None leaves that to the scheduler.
    pub cpus: Option<Vec<usize>>,
    /// Its loop. The name is replaced by the id.
    pub context: ContextConfig,
    /// Told of a panic.
    pub on_panic: Option<OnPanic>,
}

impl fmt::Debug for IoThreadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoThreadConfig")
            .field("id", &self.id)
            .field("cpus", &self.cpus)
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

/// A running iothread. Dropping it stops it.
pub struct IoThread {
    id: String,
    thread_id: i32,
    remote: Remote,
    panic: Arc<Mutex<Option<String>>>,
    thread: Option<JoinHandle<()>>,
}

thread_local! {
    static STOP: Rc<Cell<bool>> = Rc::new(Cell::new(false));
}

fn bind(cpus: &[usize]) -> std::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        if cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
        }
        set.set(cpu);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

fn cpu_list(cpus: &[usize]) -> String {
    let names: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    names.join(",")
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

impl IoThread {
    /// Starts a thread with its loop, and returns when the loop is ready.
    ///
    /// # Errors
    /// What [`Context::new`] fails with; [`Error::Affinity`] for CPUs that there are not;
    /// [`Error::Thread`] when the system has no more threads.
    pub fn start(config: IoThreadConfig) -> Result<IoThread, Error> {
        let IoThreadConfig {
            id,
            cpus,
            context,
            on_panic,
        } = config;
        let panic = Arc::new(Mutex::new(None));
        let (sender, receiver) = mpsc::sync_channel(1);
        let start_error = |source| Error::Thread {
            id: id.clone(),
            source,
        };
        let thread = {
            let (id, panic) = (id.clone(), Arc::clone(&panic));
            let name = format!("IO {id}");
            let body = move || {
                let bound = cpus.as_deref().map_or(Ok(()), |cpus| {
                    bind(cpus).map_err(|source| Error::Affinity {
                        id: id.clone(),
                        cpus: cpu_list(cpus),
                        source,
                    })
                });
                let name = id.clone();
                let ctx = bound.and_then(|()| {
                    // Only this thread waits on its ring, and only by entering it.
                    let task_run = match context.task_run {
                        TaskRun::Auto => TaskRun::Defer,
                        task_run => task_run,
                    };
                    Context::new(ContextConfig {
                        name,
                        task_run,
                        ..context
                    })
                });
                let ctx = match ctx {
                    Ok(ctx) => ctx,
                    Err(error) => {
                        let _ = sender.send(Err(error));
                        return;
                    }
                };
                let started = (
                    ctx.remote(),
                    rustix::thread::gettid().as_raw_nonzero().get(),
                );
                let _ = sender.send(Ok(started));
                drop(sender);
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| run(&ctx))) {
                    let message = panic_message(&*payload);
                    tracing::error!(iothread = id, "panic: {message}");
                    *panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
                    if let Some(on_panic) = on_panic {
                        on_panic(&id, &message);
                    }
                }
            };
            std::thread::Builder::new()
                .name(name)
                .spawn(body)
                .map_err(start_error)?
        };
        let started = receiver.recv().unwrap_or_else(|_| {
            let lost = std::io::Error::other("the thread ended before it was ready");
            Err(Error::Thread {
                id: id.clone(),
                source: lost,
            })
        });
        match started {
            Ok((remote, thread_id)) => Ok(IoThread {
                id,
                thread_id,
                remote,
                panic,
                thread: Some(thread),
            }),
            Err(error) => {
                let _ = thread.join();
                Err(error)
            }
        }
    }
}

impl IoThread {
    /// The id it was given.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its thread id, as `top -H` shows it.
    #[must_use]
    pub fn thread_id(&self) -> i32 {
        self.thread_id
    }

    /// The handle to its loop.
    #[must_use]
    pub fn remote(&self) -> &Remote {
        &self.remote
    }

    /// The message of the panic that ended the thread, if one did.
    #[must_use]
    pub fn panicked(&self) -> Option<String> {
        let panic = self.panic.lock();
        panic.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the loop and waits for its thread: what was handed over before is run, requests on
    /// the ring complete. Returns the message of the panic that ended the thread, if one did.
    ///
    /// # Errors
    /// That message.
    pub fn stop(mut self) -> Result<(), String> {
        self.end();
        match self.panicked() {
            None => Ok(()),
            Some(message) => Err(message),
        }
    }

    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.remote.run(|_| STOP.with(|stop| stop.set(true)));
            // Panics of the loop were caught and kept; `on_panic` may have panicked itself.
            let _ = thread.join();
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for IoThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoThread")
            .field("id", &self.id)
            .field("thread_id", &self.thread_id)
            .finish_non_exhaustive()
    }
}

fn run(ctx: &Context) {
    let stop = STOP.with(Rc::clone);
    while !stop.get() {
        ctx.poll(true);
    }
    ctx.shut_down();
}
