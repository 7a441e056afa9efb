//! The rules one by one, of loads that await their prefill and read what is written of it.

use kvferry_proto::scheduler::FinishOutcome;
use kvferry_proto::wire::Cause;

use crate::sim::{LEASE_MS, Sim, ms};

/// D awaits a prompt of six blocks, and P's listener knows.
fn awaiting() -> (Sim, usize) {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.allocate(i, 0);
    sim.run(ms(100));
    (sim, i)
}

#[test]
fn a_load_may_come_before_its_prefill_is_over() {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.arrive(i);
    sim.allocate(i, 2);
    sim.run(ms(8 * LEASE_MS));
    assert_eq!((sim.outcome(i), sim.d.gauges().peers), (None, 1), "connected, and waiting");
    sim.transfer_time = ms(4 * LEASE_MS);
    sim.complete(i, false);
    sim.run(ms(3 * LEASE_MS));
    assert_eq!((sim.outcome(i), sim.p_kept()), (None, 1), "the lease is kept alive under the read");
    sim.run(ms(2 * LEASE_MS));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    sim.settle();
}

#[test]
fn a_load_that_comes_after_its_prefill_is_told_at_once() {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.complete(i, false);
    sim.run(ms(LEASE_MS / 2));
    sim.allocate(i, 0);
    sim.run(ms(100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    // Too late for another one.
    let late = sim.twin(i);
    sim.allocate(late, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(late), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn what_is_written_is_read_while_the_rest_is_computed() {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.arrive(i);
    sim.allocate(i, 0);
    sim.run(ms(100));
    sim.proceed(i, 2);
    sim.run(ms(100));
    assert_eq!(sim.read(), 2, "blocks of the group that keeps all tokens");
    sim.proceed(i, 3);
    sim.run(ms(8 * LEASE_MS));
    assert_eq!((sim.outcome(i), sim.read()), (None, 5), "nothing is reported before the end, however late");
    sim.complete(i, false);
    sim.run(ms(100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    assert_eq!(sim.read(), 5 + 1 + 2, "the last block, and the window");
    sim.settle();
}

#[test]
fn what_is_read_at_once_holds_a_chunk_back_and_the_oldest_load_goes_on_first() {
    let mut sim = Sim::new();
    let loads = [sim.announce(6), sim.announce(6)];
    loads.iter().for_each(|&i| sim.allocate(i, 0));
    sim.run(ms(100));
    sim.transfer_time = ms(50);
    sim.proceed(loads[1], 1);
    sim.run(ms(10));
    sim.proceed(loads[1], 1);
    sim.proceed(loads[0], 1);
    sim.run(ms(45));
    assert_eq!(sim.read(), 1, "one chunk is under way at a time");
    sim.run(ms(50));
    assert_eq!((sim.read(), sim.read_of(loads[0])), (2, 1));
    sim.run(ms(50));
    assert_eq!((sim.read(), sim.read_of(loads[1])), (3, 2));
    loads.iter().for_each(|&i| sim.complete(i, false));
    sim.run(ms(200));
    assert_eq!(loads.map(|i| sim.outcome(i)), [Some(Ok(())); 2]);
    sim.settle();
}

#[test]
fn of_many_prompts_those_that_are_computed_first_arrive_first() {
    let mut sim = Sim::new();
    let loads: Vec<usize> = (0..64).map(|_| sim.announce(4)).collect();
    loads.iter().for_each(|&i| sim.allocate(i, 0));
    sim.run(ms(100));
    // A link that is slower than the prefills: chunks wait for it.
    sim.transfer_time = ms(50);
    let (mut done, mut most) = (Vec::new(), 0);
    let mut look = |sim: &mut Sim, span: u64| {
        for _ in 0..span {
            sim.run(ms(1));
            most = most.max(sim.d.gauges().transfers);
            let new = |&i: &usize| sim.outcome(i).is_some() && !done.contains(&i);
            let new: Vec<usize> = loads.iter().copied().filter(new).collect();
            done.extend(new);
        }
    };
    for &i in &loads {
        for _ in 0..3 {
            sim.proceed(i, 1);
            look(&mut sim, 30);
        }
        sim.complete(i, false);
    }
    look(&mut sim, 500);
    assert_eq!(done, loads, "in the order in which they are needed");
    assert!(most <= 3, "{most} reads share the link: a chunk, and what is left of prompts that are over");
    assert!(loads.iter().all(|&i| sim.outcome(i) == Some(Ok(()))));
    sim.settle();
}

#[test]
fn blocks_that_were_given_away_under_a_prefill_are_read_anew() {
    for tell in [true, false] {
        for reads in [true, false] {
            let (mut sim, i) = awaiting();
            // A read that is slow to end would write what it found behind the one that follows it.
            sim.transfer_time = ms(if reads { 5 } else { 500 });
            sim.proceed(i, 4);
            sim.run(ms(100));
            sim.transfer_time = ms(1);
            sim.preempt(i, tell);
            let other = sim.prefill(5, false).unwrap();
            sim.allocate(other, 0);
            sim.run(ms(100));
            sim.proceed(i, 3);
            sim.complete(i, false);
            sim.run(ms(100));
            assert_eq!([i, other].map(|i| sim.outcome(i)), [Some(Ok(())); 2], "every byte is compared");
            assert_eq!(sim.p_kept(), 0);
            sim.settle();
        }
    }
}

#[test]
fn a_chunk_that_is_not_what_the_producer_had_is_read_again() {
    // P gives the blocks away under the read, and D hears of that late.
    let (mut sim, i) = awaiting();
    sim.verify = true;
    sim.transfer_time = ms(50);
    sim.proceed(i, 4);
    sim.run(ms(10));
    sim.preempt(i, true);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), None);
    sim.transfer_time = ms(1);
    sim.proceed(i, 5);
    sim.run(ms(100));
    assert_eq!(sim.posted(), 2, "chunks are read again after the new start, once each");
    sim.complete(i, false);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Ok(())), "every byte is compared");
    sim.settle();
    // P writes on, and is done before or after the chunk is over.
    for early in [true, false] {
        let (mut sim, i) = awaiting();
        sim.verify = true;
        sim.transfer_time = ms(50);
        sim.proceed(i, 4);
        sim.turn(i, 3);
        sim.run(ms(10));
        sim.turn(i, 3);
        if !early {
            sim.run(ms(100));
            assert_eq!(sim.posted(), 1, "not again before the end");
        }
        sim.complete(i, false);
        sim.run(ms(200));
        assert_eq!(sim.outcome(i), Some(Ok(())), "every byte is compared");
        sim.settle();
    }
}

#[test]
fn a_read_that_is_not_what_the_producer_had_fails_the_load() {
    let (mut sim, i) = awaiting();
    sim.verify = true;
    sim.transfer_time = ms(50);
    sim.complete(i, false);
    sim.run(ms(10));
    sim.turn(i, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::DigestMismatch)));
    sim.settle();
}

#[test]
fn a_read_of_blocks_that_were_given_away_has_its_time_and_no_more() {
    let (mut sim, i) = awaiting();
    sim.transfer_time = ms(60_000);
    sim.cancel_time = ms(60_000);
    sim.proceed(i, 4);
    sim.run(ms(100));
    sim.preempt(i, true);
    sim.complete(i, false);
    sim.run(ms(4_800));
    assert_eq!((sim.outcome(i), sim.p_kept()), (None, 1), "the lease is kept alive meanwhile");
    sim.run(ms(400));
    assert_eq!(sim.d.gauges().loads, 1, "its memory may still be written");
    sim.run(ms(60_000));
    assert_eq!(sim.outcome(i), Some(Err(Cause::Timeout)));
    sim.settle();
}

#[test]
fn a_prefill_that_is_aborted_under_its_chunks_fails_the_load() {
    let (mut sim, i) = awaiting();
    sim.proceed(i, 4);
    sim.run(ms(3));
    sim.complete(i, true);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_load_that_is_aborted_under_a_chunk_waits_for_it() {
    let (mut sim, i) = awaiting();
    sim.transfer_time = ms(1_000);
    sim.proceed(i, 4);
    sim.run(ms(10));
    sim.finish(i, FinishOutcome::Aborted);
    sim.run(ms(1));
    assert_eq!((sim.outcome(i), sim.d.gauges().transfers), (None, 1));
    sim.run(ms(100));
    assert_eq!((sim.outcome(i), sim.d.gauges().transfers), (Some(Err(Cause::Aborted)), 0));
    sim.complete(i, false);
    sim.run(ms(100));
    assert_eq!(sim.p_kept(), 0);
    sim.settle();
}

#[test]
fn a_prefill_that_ends_without_a_hand_over_fails_the_load() {
    let (mut sim, i) = awaiting();
    sim.complete(i, true);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_prefill_that_never_is_over_fails_the_load_in_the_end() {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.allocate(i, 0);
    sim.run(ms(19_000));
    assert_eq!(sim.outcome(i), None);
    sim.run(ms(2_000));
    assert_eq!(sim.outcome(i), Some(Err(Cause::Timeout)));
    sim.settle();
}

#[test]
fn a_load_that_is_aborted_while_it_waits_gives_the_prefill_back() {
    let (mut sim, i) = awaiting();
    sim.finish(i, FinishOutcome::Aborted);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::Aborted)));
    sim.complete(i, false);
    sim.run(ms(100));
    assert_eq!(sim.p_kept(), 0, "the release that came before the grant counts");
    sim.settle();
}

#[test]
fn a_producer_that_dies_fails_the_load_that_waits() {
    let (mut sim, i) = awaiting();
    sim.restart_p();
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::PeerDied)));
    sim.settle();
}
