//! The worker's reports and commands.

#[path = "../../src/connector/beacon.rs"]
mod beacon;
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
        let passenger = publish_two(&shared);
        let mut got: Vec<u32> = shared.take_report().map(|r| r.finished_recving).unwrap_or_default();
        passenger.join().unwrap();
        got.extend(shared.take_report().map(|r| r.finished_recving).unwrap_or_default());
        assert_eq!(got, [1, 2], "in order, none lost");
        assert!(shared.take_report().is_none());
    });
}

/// A poller with a buffer of its own, while reports are published: it gets each once, and what it leaves behind is not
/// taken again.
#[test]
fn a_report_that_was_copied_is_not_taken_again() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let passenger = publish_two(&shared);
        let mut out = [0; 8];
        let mut got = Vec::new();
        let take = |got: &mut Vec<u8>, out: &mut [u8]| {
            let len = shared.take_into(out).unwrap();
            got.extend_from_slice(&out[..len]);
        };
        take(&mut got, &mut out);
        take(&mut got, &mut out);
        passenger.join().unwrap();
        take(&mut got, &mut out);
        assert_eq!(got, [1, 2], "in order, none lost");
        assert!(shared.take_report().is_none());
        assert_eq!(shared.take_into(&mut out).unwrap(), 0);
    });
}

/// A waiter is woken by a report, and by the passenger's end.
#[test]
fn a_waiter_gets_the_report_or_the_end() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let passenger = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.publish(report(1));
                shared.set_gone();
            })
        };
        let first = shared.wait_report(Duration::from_secs(3600));
        assert_eq!(first.map(|r| r.finished_recving), Some(vec![1]));
        assert!(shared.wait_report(Duration::from_secs(3600)).is_none());
        passenger.join().unwrap();
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
