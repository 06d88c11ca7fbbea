//! The lock-free parts under loom, which tries every order of events that the memory model allows:
//! waking a loop, handing work to it, and reading its statistics. The files under test are those
//! of the crate, compiled here over loom's atomics. Each test names the weakening it fails for.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;

use loom::thread;

mod sync {
    pub(crate) use loom::sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence},
    };
    pub(crate) use loom::thread::yield_now as spin_loop;
}

#[allow(dead_code)]
#[path = "../src/inbox.rs"]
mod inbox;
#[allow(dead_code)]
#[path = "../src/notify.rs"]
mod notify;
#[allow(dead_code)]
#[path = "../src/sequence.rs"]
mod sequence;

use inbox::{Closed, Inbox, Item};
use notify::Notify;
use sequence::{Counter, Sequence};
use sync::{Arc, AtomicBool, AtomicU32, Ordering};

/// Every interleaving with at most this many forced switches of threads.
fn model(switches: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(test);
}

fn raise(flag: &AtomicBool) {
    flag.store(true, Ordering::Relaxed);
}

fn is_up(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

/// A loop that sleeps is kicked; one that does not sleep sees the work. Fails if either SeqCst
/// fence is removed.
#[test]
fn a_notified_loop_does_not_sleep_for_ever() {
    model(4, || {
        let notify = Arc::new(Notify::new());
        let work = Arc::new(AtomicBool::new(false));
        let kicked = Arc::new(AtomicBool::new(false));
        let other = {
            let (notify, work, kicked) = (notify.clone(), work.clone(), kicked.clone());
            thread::spawn(move || {
                raise(&work);
                if notify.notify() {
                    raise(&kicked);
                }
            })
        };
        let sleeps = !notify.about_to_sleep();
        if !sleeps {
            notify.awake();
            assert!(notify.take(), "only the loop takes a notification");
            assert!(is_up(&work), "notified, and the work is not visible");
        }
        other.join().unwrap();
        assert!(!sleeps || is_up(&kicked), "asleep with nobody to wake it");
    });
}

/// A loop that another one drives sleeps in that one's wait. Fails if the fence of
/// `sleep_outside` is removed.
#[test]
fn a_driven_loop_does_not_sleep_for_ever() {
    model(4, || {
        let notify = Arc::new(Notify::new());
        let kicked = Arc::new(AtomicBool::new(false));
        let other = {
            let (notify, kicked) = (notify.clone(), kicked.clone());
            thread::spawn(move || {
                if notify.notify() {
                    raise(&kicked);
                }
            })
        };
        let sleeps = !notify.sleep_outside(true);
        other.join().unwrap();
        assert!(!sleeps || is_up(&kicked), "asleep with nobody to wake it");
    });
}

/// One `take` acquires what all notifiers before it have published. Fails if the swap of `notify`
/// is a store, or relaxed, or that of `take` is relaxed.
#[test]
fn taking_a_notification_acquires_the_work_of_all_notifiers() {
    model(4, || {
        let notify = Arc::new(Notify::new());
        let works = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let others = works.clone().map(|work| {
            let notify = notify.clone();
            thread::spawn(move || {
                raise(&work);
                let _ = notify.notify();
            })
        });
        let taken = notify.take();
        let seen = works.each_ref().map(|work| is_up(work));
        for other in others {
            other.join().unwrap();
        }
        // Nothing left: both came before the first one, if that took anything.
        if taken && !notify.take() {
            assert_eq!(seen, [true, true]);
        }
        if taken {
            assert!(seen[0] || seen[1]);
        }
    });
}

/// What two threads push is taken once each, and comes with what they wrote before. Fails if the
/// exchange of `push` or the swap of `take` is relaxed.
#[test]
fn what_is_pushed_is_taken_once_and_whole() {
    model(3, || {
        let inbox = Arc::new(Inbox::new());
        let items = [(); 2].map(|()| Item::new(AtomicU32::new(0)));
        let others = items.clone().map(|item| {
            let inbox = inbox.clone();
            thread::spawn(move || {
                item.value.store(7, Ordering::Relaxed);
                inbox.push(&item).unwrap();
            })
        });
        let taken = Cell::new(0);
        let take = || {
            inbox.take(|item: Arc<Item<AtomicU32>>| {
                assert_eq!(item.value.load(Ordering::Relaxed), 7);
                taken.set(taken.get() + 1);
            });
        };
        while taken.get() == 0 {
            take();
            thread::yield_now();
        }
        for other in others {
            other.join().unwrap();
        }
        take();
        assert_eq!(taken.get(), 2);
        assert!(inbox.is_empty());
    });
}

/// An item that is pushed while it is queued, or being taken, is run with what was written before
/// that push. Fails if `queued` is reset after the item was run, or if either of its swaps is
/// relaxed.
#[test]
fn an_item_pushed_again_is_run_again_or_sees_the_second_push() {
    model(4, || {
        let inbox = Arc::new(Inbox::new());
        let item = Item::new(AtomicBool::new(false));
        inbox.push(&item).unwrap();
        let other = {
            let (inbox, item) = (inbox.clone(), item.clone());
            thread::spawn(move || {
                raise(&item.value);
                inbox.push(&item).unwrap();
            })
        };
        let mut seen = false;
        let mut take = || inbox.take(|item: Arc<Item<AtomicBool>>| seen |= is_up(&item.value));
        take();
        other.join().unwrap();
        take();
        assert!(seen, "the second push is lost");
    });
}

/// What is pushed while the inbox closes is refused or handed out, never lost; loom tells of what
/// is not freed. Fails if `push` does not look for the mark, or does not give its reference back.
#[test]
fn a_push_against_closing_is_refused_or_handed_out() {
    model(4, || {
        let inbox = Arc::new(Inbox::new());
        let item = Item::new(());
        let other = {
            let (inbox, item) = (inbox.clone(), item.clone());
            thread::spawn(move || inbox.push(&item))
        };
        let mut taken = 0;
        inbox.close(|_| taken += 1);
        let pushed = other.join().unwrap();
        assert_eq!(pushed, if taken == 1 { Ok(()) } else { Err(Closed) });
        assert_eq!(inbox.push(&item), Err(Closed));
    });
}

/// The whole way of a bottom half from another thread: push, notify, and the loop's iteration.
/// Fails if `notify` comes before the push, or for any weakening that the tests above fail for.
#[test]
fn a_bottom_half_of_another_thread_is_run_or_wakes_the_loop() {
    model(3, || {
        let notify = Arc::new(Notify::new());
        let inbox = Arc::new(Inbox::new());
        let kicked = Arc::new(AtomicBool::new(false));
        let other = {
            let (notify, inbox, kicked) = (notify.clone(), inbox.clone(), kicked.clone());
            let item = Item::new(());
            thread::spawn(move || {
                inbox.push(&item).unwrap();
                if notify.notify() {
                    raise(&kicked);
                }
            })
        };
        let mut ran = false;
        let mut asleep = false;
        while !ran && !asleep {
            // As in an iteration: no sleep with work in the inbox, nor when notified.
            if inbox.is_empty() {
                asleep = !notify.about_to_sleep();
                if asleep {
                    break;
                }
                notify.awake();
            }
            notify.take();
            inbox.take(|_| ran = true);
        }
        other.join().unwrap();
        assert!(ran || is_up(&kicked), "asleep with nobody to wake it");
    });
}

/// What a reader of statistics gets is of one handler, never half of it and half of the next.
/// Fails if either fence is removed, or if the last store of a change is relaxed.
#[test]
fn statistics_of_a_slot_are_of_one_handler() {
    model(4, || {
        let slot = Arc::new((Sequence::default(), Counter::default(), Counter::default()));
        let writer = {
            let slot = slot.clone();
            thread::spawn(move || {
                for name in [1, 2] {
                    slot.0.change(|| {
                        slot.1.set(name);
                        slot.2.set(name * 10);
                    });
                }
            })
        };
        let (name, count) = slot.0.read(|| (slot.1.get(), slot.2.get()));
        assert_eq!(count, name * 10);
        writer.join().unwrap();
    });
}

/// A count grows for every reader and ends exact. Fails if the writer stores less than it has
/// loaded (an `add` that loses its own earlier ones).
#[test]
fn a_count_never_falls_and_ends_exact() {
    model(4, || {
        let counter = Arc::new(Counter::default());
        let writer = {
            let counter = counter.clone();
            thread::spawn(move || (0..3).for_each(|_| counter.add(2)))
        };
        let first = counter.get();
        let second = counter.get();
        assert!(first <= second && second <= 6 && second.is_multiple_of(2));
        writer.join().unwrap();
        assert_eq!(counter.get(), 6);
    });
}
