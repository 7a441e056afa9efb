//! Idle agents sleep.

use std::time::Duration;

use crate::common::agent::{Node, assert_same, config, plan, transports, until};
use crate::common::alone::alone;
use kvferry::agent::Direction;

/// Processor time of this process's threads called `name`.
///
/// From `schedstat`, to the nanosecond. The ticks of `stat` do not do: a tick that finds a thread at work charges it for all
/// ten milliseconds, and a timer wakes a thread just at a tick.
fn processor_time(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named: Vec<_> =
        tasks.filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)).collect();
    assert!(!named.is_empty(), "no thread is called {name}");
    let nanos = named.iter().map(|task| {
        let text = std::fs::read_to_string(task.join("schedstat")).unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    });
    Duration::from_nanos(nanos.sum())
}

/// Both sides are connected and have moved bytes both ways; then nothing happens for three seconds.
#[test]
fn connected_idle_agents_use_no_processor_time() {
    alone!();
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
        let (turns, before) = (turns_of_both(), processor_time("kvf-progress"));
        std::thread::sleep(Duration::from_secs(3));
        let used = processor_time("kvf-progress") - before;
        let turns = turns_of_both() - turns;
        // Two looks at the port each, and what it costs to be asked for statistics.
        assert!(used < Duration::from_millis(10), "{used:?}, {turns} turns");
        // One that slept in steps of a millisecond would have 3,000.
        assert!(turns < 100, "{turns} turns in three idle seconds");
        a.move_all(peer, Direction::Read, one());
        assert_same("still works", &a.contents(), &b.contents());
    }
}
