//! The worker's reports and commands.

#[path = "../../src/connector/shared.rs"]
mod shared;

mod trace {
    pub struct Tracer;
}

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use shared::{Command, Shared};

use crate::proto::wire::WorkerReport;
use crate::sys::{Outbox, OutboxMemory};

fn report(id: u32) -> WorkerReport {
    WorkerReport { finished_recving: vec![id], ..WorkerReport::default() }
}

/// A thread that publishes reports 1 and 2.
fn publish_two(shared: &Arc<Shared>) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || {
        shared.publish(report(1));
        shared.publish(report(2));
    })
}

/// What is published is taken once, whoever polls when.
#[test]
fn each_report_is_taken_once() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let driver = publish_two(&shared);
        let mut got: Vec<u32> = shared.take_report().map(|r| r.finished_recving).unwrap_or_default();
        driver.join().unwrap();
        got.extend(shared.take_report().map(|r| r.finished_recving).unwrap_or_default());
        assert_eq!(got, [1, 2], "in order, none lost");
        assert!(shared.take_report().is_none());
    });
}

fn with_outbox() -> (Arc<Shared>, Arc<OutboxMemory>) {
    let (shared, memory) = (Arc::new(Shared::default()), Arc::new(OutboxMemory::default()));
    shared.set_outbox(Some(Outbox(Arc::clone(&memory))));
    (shared, memory)
}

/// A reader of an outbox, which asks by a call only where the outbox says so, gets each report once and in order.
#[test]
fn a_report_in_the_outbox_is_read_once() {
    loom::model(|| {
        let (shared, memory) = with_outbox();
        let driver = publish_two(&shared);
        let mut got = Vec::new();
        let look = |got: &mut Vec<u32>| {
            if memory.more() {
                got.extend(shared.take_report().into_iter().flat_map(|r| r.finished_recving));
            } else {
                got.extend(memory.read().into_iter().flatten().map(u32::from));
            }
        };
        look(&mut got);
        look(&mut got);
        driver.join().unwrap();
        look(&mut got);
        look(&mut got);
        assert_eq!(got, [1, 2], "in order, none lost, none twice");
        assert!(memory.read().is_none() && shared.take_report().is_none());
    });
}

/// A call gives what lies in the outbox too.
#[test]
fn a_waiter_gets_what_is_in_the_outbox() {
    loom::model(|| {
        let (shared, memory) = with_outbox();
        let driver = publish_two(&shared);
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(shared.wait_report(Duration::from_secs(3600)).unwrap().finished_recving);
        }
        assert_eq!(got, [1, 2]);
        driver.join().unwrap();
        assert!(memory.read().is_none());
    });
}

/// An outbox that is taken away is not written to any more, and nothing that was in it is lost.
#[test]
fn an_outbox_can_be_taken_away() {
    loom::model(|| {
        let (shared, memory) = with_outbox();
        let driver = publish_two(&shared);
        shared.set_outbox(None);
        // As the caller's `free` would.
        memory.overwrite();
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(shared.wait_report(Duration::from_secs(3600)).unwrap().finished_recving);
        }
        assert_eq!(got, [1, 2]);
        driver.join().unwrap();
    });
}

/// A waiter is woken by a report, and by the driver's end.
#[test]
fn a_waiter_gets_the_report_or_the_end() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let driver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.publish(report(1));
                shared.set_gone();
            })
        };
        let first = shared.wait_report(Duration::from_secs(3600));
        assert_eq!(first.map(|r| r.finished_recving), Some(vec![1]));
        assert!(shared.wait_report(Duration::from_secs(3600)).is_none());
        driver.join().unwrap();
    });
}

/// Commands come out in the order in which one thread gave them.
#[test]
fn commands_keep_their_order() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let handle = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.push(Command::Step(vec![1]));
                shared.push(Command::Step(vec![2]));
            })
        };
        let mut got = Vec::new();
        while got.len() < 2 {
            match shared.pop() {
                Some(Command::Step(step)) => got.extend(step),
                _ => thread::yield_now(),
            }
        }
        assert_eq!(got, [1, 2]);
        handle.join().unwrap();
    });
}
