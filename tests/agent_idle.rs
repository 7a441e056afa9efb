//! Idle agents sleep. A test binary of its own, so that no other test's agents run in the process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::Duration;

use common::agent::{Node, assert_same, config, plan, transports, until};
use kvferry::agent::Direction;

/// Clock ticks of processor time that this process's thread `name` has used.
fn ticks(name: &str) -> u64 {
    let mut found = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        let (head, tail) = stat.rsplit_once(')').unwrap();
        if head.ends_with(&format!("({name}")) {
            let fields: Vec<&str> = tail.split_whitespace().collect();
            // utime and stime, fields 14 and 15 of proc(5); the state after the name is field 3.
            found.push(fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap());
        }
    }
    assert!(!found.is_empty(), "no thread is called {name}");
    found.into_iter().sum()
}

/// Both sides are connected and have moved bytes both ways; then nothing happens for ten seconds.
#[test]
fn connected_idle_agents_use_no_processor_time() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[1 << 20]);
        let mut b = Node::start(config("b", transport), 2, &[1 << 20]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let one = || plan(0, 0, 1 << 20, 1 << 20, vec![0], vec![0]);
        a.move_all(peer, Direction::Read, one());
        a.agent.send(peer, vec![1; 100]).unwrap();
        b.wait_message();
        // As one who waits by polling without a pause, so that the progress thread stands aside.
        (0..100_000).for_each(|_| assert!(a.agent.poll_event().is_none()));
        let turns_of_both = || a.agent.stats().unwrap().turns + b.agent.stats().unwrap().turns;
        // What serves reads spins on for a while.
        until("the spin after the transfer to be over", || {
            let turns = turns_of_both();
            std::thread::sleep(Duration::from_millis(50));
            turns_of_both() - turns < 100
        });
        let (turns, before) = (turns_of_both(), ticks("kvf-progress"));
        std::thread::sleep(Duration::from_secs(10));
        // One tick is 10 ms; both threads together may have been charged one for being asked for their statistics.
        let used = ticks("kvf-progress") - before;
        let turns = turns_of_both() - turns;
        assert!(used <= 2, "{used} ticks, {turns} turns");
        // One that slept in steps of a millisecond would have 10,000.
        assert!(turns < 1000, "{turns} turns in ten idle seconds");
        a.move_all(peer, Direction::Read, one());
        assert_same("still works", &a.contents(), &b.contents());
    }
}
