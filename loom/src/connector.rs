//! The worker's reports and commands.

#[path = "../../src/connector/channel.rs"]
mod channel;

mod trace {
    pub struct Tracer;
}

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use channel::{Command, WorkerChannel};

use crate::proto::wire::WorkerReport;
use crate::sys::{Outbox, OutboxMemory};

fn report(id: u32) -> WorkerReport {
    WorkerReport { finished_recving: vec![id], ..WorkerReport::default() }
}

/// A thread that publishes reports 1 and 2.
fn publish_two(channel: &Arc<WorkerChannel>) -> thread::JoinHandle<()> {
    let channel = Arc::clone(channel);
    thread::spawn(move || {
        channel.publish(report(1));
        channel.publish(report(2));
    })
}

/// What is published is taken once, whoever polls when.
#[test]
fn each_report_is_taken_once() {
    loom::model(|| {
        let channel = Arc::new(WorkerChannel::default());
        let driver = publish_two(&channel);
        let mut got: Vec<u32> = channel.take_report().map(|r| r.finished_recving).unwrap_or_default();
        driver.join().unwrap();
        got.extend(channel.take_report().map(|r| r.finished_recving).unwrap_or_default());
        assert_eq!(got, [1, 2], "in order, none lost");
        assert!(channel.take_report().is_none());
    });
}

fn with_outbox() -> (Arc<WorkerChannel>, Arc<OutboxMemory>) {
    let (channel, memory) = (Arc::new(WorkerChannel::default()), Arc::new(OutboxMemory::default()));
    channel.set_outbox(Some(Outbox(Arc::clone(&memory))));
    (channel, memory)
}

/// A reader of an outbox, which asks by a call only where the outbox says so, gets each report once and in order.
#[test]
fn a_report_in_the_outbox_is_read_once() {
    loom::model(|| {
        let (channel, memory) = with_outbox();
        let driver = publish_two(&channel);
        let mut got = Vec::new();
        let look = |got: &mut Vec<u32>| {
            if memory.more() {
                got.extend(channel.take_report().into_iter().flat_map(|r| r.finished_recving));
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
        assert!(memory.read().is_none() && channel.take_report().is_none());
    });
}

/// A call gives what lies in the outbox too.
#[test]
fn a_waiter_gets_what_is_in_the_outbox() {
    loom::model(|| {
        let (channel, memory) = with_outbox();
        let driver = publish_two(&channel);
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(channel.wait_report(Duration::from_secs(3600)).unwrap().finished_recving);
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
        let (channel, memory) = with_outbox();
        let driver = publish_two(&channel);
        channel.set_outbox(None);
        // As the caller's `free` would.
        memory.overwrite();
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(channel.wait_report(Duration::from_secs(3600)).unwrap().finished_recving);
        }
        assert_eq!(got, [1, 2]);
        driver.join().unwrap();
    });
}

/// A waiter is woken by a report, and by the driver's end.
#[test]
fn a_waiter_gets_the_report_or_the_end() {
    loom::model(|| {
        let channel = Arc::new(WorkerChannel::default());
        let driver = {
            let channel = Arc::clone(&channel);
            thread::spawn(move || {
                channel.publish(report(1));
                channel.set_gone();
            })
        };
        let first = channel.wait_report(Duration::from_secs(3600));
        assert_eq!(first.map(|r| r.finished_recving), Some(vec![1]));
        assert!(channel.wait_report(Duration::from_secs(3600)).is_none());
        driver.join().unwrap();
    });
}

/// Commands come out in the order in which one thread gave them.
#[test]
fn commands_keep_their_order() {
    loom::model(|| {
        let channel = Arc::new(WorkerChannel::default());
        let handle = {
            let channel = Arc::clone(&channel);
            thread::spawn(move || {
                channel.push(Command::Step(vec![1]));
                channel.push(Command::Step(vec![2]));
            })
        };
        let mut got = Vec::new();
        while got.len() < 2 {
            match channel.pop() {
                Some(Command::Step(step)) => got.extend(step),
                _ => thread::yield_now(),
            }
        }
        assert_eq!(got, [1, 2]);
        handle.join().unwrap();
    });
}
