//! The rules one by one.

use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::wire::{Cause, PeerMessage};

use crate::sim::{LEASE_MS, Sim, ms};

#[test]
fn a_request_is_handed_over_and_both_sides_forget_it() {
    let mut sim = Sim::new();
    let i = sim.prefill(6, false).unwrap();
    sim.arrive(i);
    sim.allocate(i, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Ok(())));
    assert_eq!(sim.p_kept(), 0);
    sim.settle();
}

#[test]
fn the_cached_prefix_is_not_read_and_a_full_hit_only_releases() {
    let mut sim = Sim::new();
    let part = sim.prefill(7, false).unwrap();
    let full = sim.prefill(5, false).unwrap();
    sim.allocate(part, 5);
    sim.allocate(full, 5);
    sim.run(ms(100));
    assert_eq!((sim.outcome(part), sim.outcome(full)), (Some(Ok(())), None));
    assert_eq!(sim.p_kept(), 0, "the full hit gave P's blocks back too");
    assert!(sim.sent.iter().any(|m| matches!(m, PeerMessage::Release { .. })));
    sim.settle();
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
fn what_is_read_at_once_holds_a_portion_back_and_the_oldest_load_goes_on_first() {
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
    assert_eq!(sim.read(), 1, "one portion is under way at a time");
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
    // A link that is slower than the prefills: portions wait for it.
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
    assert!(most <= 3, "{most} reads share the link: a portion, and what is left of prompts that are over");
    assert!(loads.iter().all(|&i| sim.outcome(i) == Some(Ok(()))));
    sim.settle();
}

/// D awaits a prompt of six blocks, and P's listener knows.
fn awaiting() -> (Sim, usize) {
    let mut sim = Sim::new();
    let i = sim.announce(6);
    sim.allocate(i, 0);
    sim.run(ms(100));
    (sim, i)
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
fn a_portion_that_is_not_what_the_producer_had_is_read_again() {
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
    assert_eq!(sim.posted(), 2, "portions are read again after the new start, once each");
    sim.complete(i, false);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Ok(())), "every byte is compared");
    sim.settle();
    // P writes on, and is done before or after the portion is over.
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
fn a_prefill_that_is_aborted_under_its_portions_fails_the_load() {
    let (mut sim, i) = awaiting();
    sim.proceed(i, 4);
    sim.run(ms(3));
    sim.complete(i, true);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_load_that_is_aborted_under_a_portion_waits_for_it() {
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

#[test]
fn a_held_request_outlives_many_leases() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.arrive(i);
    sim.run(ms(10 * LEASE_MS));
    assert_eq!(sim.p_kept(), 1);
    sim.allocate(i, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Ok(())));
    sim.settle();
}

#[test]
fn without_a_heartbeat_the_lease_expires_and_the_read_is_not_believed() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.run(ms(LEASE_MS + 100));
    assert_eq!(sim.p_kept(), 0);
    sim.allocate(i, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_lease_that_expires_under_the_read_fails_it() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(100);
    sim.allocate(i, 0);
    sim.run(ms(20));
    sim.partition_until = sim.now + ms(2 * LEASE_MS);
    sim.run(ms(3 * LEASE_MS));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn heartbeats_keep_a_long_read_valid() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(4 * LEASE_MS);
    sim.allocate(i, 0);
    sim.run(ms(5 * LEASE_MS));
    assert_eq!(sim.outcome(i), Some(Ok(())));
    sim.settle();
}

#[test]
fn a_consumer_faster_than_the_producers_step_gets_its_verdict_with_the_grant() {
    let mut sim = Sim::new();
    sim.p_lag = ms(500);
    let i = sim.prefill(4, false).unwrap();
    sim.allocate(i, 0);
    sim.run(ms(400));
    assert_eq!((sim.outcome(i), sim.p_gauges().early), (None, 1));
    sim.run(ms(200));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    sim.settle();
}

#[test]
fn a_request_that_is_never_scheduled_gives_the_blocks_back() {
    let mut sim = Sim::new();
    let held = sim.prefill(4, false).unwrap();
    let unknown = sim.prefill(4, false).unwrap();
    sim.arrive(held);
    sim.run(ms(50));
    sim.finish(held, FinishOutcome::Aborted);
    sim.finish(unknown, FinishOutcome::Aborted);
    sim.run(ms(50));
    assert_eq!(sim.p_kept(), 0);
    sim.settle();
}

#[test]
fn an_abort_waits_for_the_transfer_then_releases() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(1_000);
    sim.allocate(i, 0);
    sim.run(ms(50));
    sim.finish(i, FinishOutcome::Aborted);
    sim.run(ms(100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Err(Cause::Aborted)), 0));
    sim.settle();
}

#[test]
fn an_abort_in_the_step_of_its_load_is_reported_too() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.run(ms(10));
    sim.allocate(i, 0);
    sim.finish(i, FinishOutcome::Aborted);
    sim.run(ms(100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Err(Cause::Aborted)), 0));
    sim.settle();
}

#[test]
fn a_producer_that_restarts_under_the_read_is_a_dead_peer_and_the_next_request_works() {
    let mut sim = Sim::new();
    let old = sim.prefill(4, false).unwrap();
    let stale = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(1_000);
    sim.allocate(old, 0);
    sim.run(ms(50));
    sim.restart_p();
    sim.transfer_time = ms(5);
    let new = sim.prefill(4, false).unwrap();
    sim.allocate(new, 0);
    sim.allocate(stale, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(old), Some(Err(Cause::PeerDied)));
    assert_eq!(sim.outcome(stale), Some(Err(Cause::PeerDied)), "the lease was another life's");
    assert_eq!(sim.outcome(new), Some(Ok(())));
    sim.settle();
}

#[test]
fn a_broken_connection_heals_by_itself() {
    let mut sim = Sim::new();
    let first = sim.prefill(4, false).unwrap();
    sim.arrive(first);
    sim.run(ms(50));
    sim.break_connections();
    sim.run(ms(10));
    sim.allocate(first, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(first), Some(Ok(())), "a load is worth a new handshake");
    sim.settle();
}

#[test]
fn an_unreachable_producer_fails_the_load_within_its_bound() {
    let mut sim = Sim::new();
    let refused = sim.prefill(4, false).unwrap();
    let silent = sim.prefill(4, false).unwrap();
    sim.down_until = sim.now + ms(50);
    sim.allocate(refused, 0);
    sim.run(ms(60));
    assert_eq!(sim.outcome(refused), Some(Err(Cause::HandshakeFailed)));
    sim.partition_until = sim.now + ms(10_000);
    sim.allocate(silent, 0);
    sim.run(ms(3_100));
    assert_eq!(sim.outcome(silent), Some(Err(Cause::HandshakeFailed)));
    sim.settle();
}

#[test]
fn a_failed_transfer_fails_its_load_alone() {
    let mut sim = Sim::new();
    let bad = sim.prefill(4, false).unwrap();
    let good = sim.prefill(4, false).unwrap();
    sim.fail_next_transfer = true;
    sim.allocate(bad, 0);
    sim.run(ms(2));
    sim.allocate(good, 0);
    sim.run(ms(100));
    assert_eq!((sim.outcome(bad), sim.outcome(good)), (Some(Err(Cause::TransportError)), Some(Ok(()))));
    assert_eq!(sim.p_kept(), 0, "the failed one released P's blocks");
    sim.settle();
}

#[test]
fn a_transfer_that_takes_too_long_is_cancelled() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(60_000);
    sim.allocate(i, 0);
    sim.run(ms(5_100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Err(Cause::Timeout)), 0));
    sim.settle();
}

#[test]
fn a_verdict_that_does_not_come_fails_the_load() {
    let mut sim = Sim::new();
    let i = sim.prefill(4, false).unwrap();
    sim.drop_verdicts = true;
    sim.allocate(i, 0);
    sim.run(ms(1_000));
    assert_eq!(sim.outcome(i), None);
    sim.run(ms(1_000));
    assert_eq!(sim.outcome(i), Some(Err(Cause::Timeout)));
    sim.settle();
}

#[test]
fn a_prefill_that_aborts_leaves_nothing() {
    let mut sim = Sim::new();
    assert_eq!(sim.prefill(4, true), None);
    sim.run(ms(10));
    assert_eq!(sim.p_gauges().tombstones, 1);
    sim.settle();
}

#[test]
fn a_shutdown_reports_what_was_being_read() {
    let mut sim = Sim::new();
    let reading = sim.prefill(4, false).unwrap();
    let waiting = sim.prefill(4, false).unwrap();
    sim.transfer_time = ms(1_000);
    sim.allocate(reading, 0);
    sim.run(ms(50));
    assert!(!sim.d.is_drained());
    sim.shut_down_d();
    sim.allocate(waiting, 0);
    sim.run(ms(100));
    assert!(sim.d.is_drained());
    assert_eq!(sim.outcome(reading), Some(Err(Cause::ShutDown)));
    assert_eq!(sim.outcome(waiting), Some(Err(Cause::ShutDown)));
    sim.settle();
}

#[test]
fn heartbeats_of_one_peer_travel_together() {
    let mut sim = Sim::new();
    for _ in 0..5 {
        let i = sim.prefill(2, false).unwrap();
        sim.arrive(i);
    }
    sim.run(ms(50));
    sim.sent.clear();
    sim.run(ms(LEASE_MS));
    let beats: Vec<usize> = sim
        .sent
        .iter()
        .map(|m| match m {
            PeerMessage::Heartbeat { requests, .. } => requests.len(),
            other => panic!("only heartbeats are expected, got {other:?}"),
        })
        .collect();
    assert_eq!(beats, vec![5; 6], "a lease of {LEASE_MS} ms is renewed six times, for all requests at once");
    sim.settle();
}

#[test]
fn two_requests_for_one_prefill_never_believe_freed_blocks() {
    let mut sim = Sim::new();
    let a = sim.prefill(4, false).unwrap();
    let b = sim.twin(a);
    let c = sim.twin(a);
    sim.arrive(c);
    sim.run(ms(10));
    sim.transfer_time = ms(100);
    sim.allocate(a, 0);
    sim.run(ms(10));
    sim.finish(c, FinishOutcome::Aborted);
    sim.run(ms(10));
    assert_eq!(sim.p_kept(), 1, "one of them gave up, the other still reads");
    sim.run(ms(200));
    assert_eq!((sim.outcome(a), sim.p_kept()), (Some(Ok(())), 0), "nobody has said that another one may follow");
    sim.allocate(b, 0);
    sim.run(ms(500));
    assert_eq!(sim.outcome(b), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_name_used_again_is_granted_anew_even_when_its_consumer_is_early() {
    let mut sim = Sim::new();
    let first = sim.prefill(4, false).unwrap();
    sim.allocate(first, 0);
    sim.run(ms(50));
    sim.p_lag = ms(400);
    let second = sim.prefill(4, false).unwrap();
    assert_eq!(sim.requests[first].params.remote_request_id, sim.requests[second].params.remote_request_id);
    sim.allocate(second, 0);
    sim.run(ms(600));
    assert_eq!((sim.outcome(first), sim.outcome(second)), (Some(Ok(())), Some(Ok(()))));
    sim.settle();
}

#[test]
fn all_requests_for_one_prefill_load_it_at_once_and_its_blocks_are_freed_once() {
    let mut sim = Sim::new();
    let first = sim.prefill(6, false).unwrap();
    let all = [first, sim.twin(first), sim.twin(first), sim.twin(first)];
    all.iter().for_each(|i| sim.arrive(*i));
    sim.run(ms(20));
    for (k, i) in all.into_iter().enumerate() {
        sim.transfer_time = ms(10 + 100 * k as u64);
        sim.allocate(i, k % 2);
        sim.run(ms(5));
    }
    sim.run(ms(220));
    assert_eq!((sim.outcome(all[0]), sim.p_kept()), (Some(Ok(())), 1), "two of them still read");
    sim.run(ms(250));
    let outcomes: Vec<_> = all.iter().map(|i| sim.outcome(*i)).collect();
    assert_eq!((outcomes, sim.p_kept()), (vec![Some(Ok(())); 4], 0));
    sim.settle();
}

#[test]
fn a_request_that_is_held_keeps_the_prefill_that_another_one_has_loaded() {
    let mut sim = Sim::new();
    let first = sim.prefill(6, false).unwrap();
    let (queued, aborted) = (sim.twin(first), sim.twin(first));
    [first, queued, aborted].iter().for_each(|i| sim.arrive(*i));
    sim.allocate(first, 0);
    sim.run(ms(5 * LEASE_MS));
    assert_eq!((sim.outcome(first), sim.p_kept()), (Some(Ok(())), 1));
    sim.finish(aborted, FinishOutcome::Aborted);
    sim.allocate(queued, 0);
    sim.run(ms(50));
    assert_eq!((sim.outcome(queued), sim.p_kept()), (Some(Ok(())), 0));
    sim.settle();
}

#[test]
fn a_prefill_that_others_may_share_is_kept_for_them_for_a_while() {
    let mut sim = Sim::new();
    let first = sim.prefill(6, false).unwrap();
    sim.share(first);
    let (second, cached, late) = (sim.twin(first), sim.twin(first), sim.twin(first));
    for i in [first, second] {
        sim.allocate(i, 0);
        sim.run(ms(LEASE_MS));
        assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 1), "the load does not wait for the others");
    }
    // Of the next one all is cached here: it only gives back, and may be followed too.
    sim.allocate(cached, 6);
    sim.run(ms(1_900));
    assert_eq!(sim.p_kept(), 1);
    sim.run(ms(200));
    assert_eq!(sim.p_kept(), 0, "nobody came for the length of the grace");
    sim.allocate(late, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(late), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_request_that_nobody_shares_frees_the_blocks_with_its_verdict() {
    let mut sim = Sim::new();
    let i = sim.prefill(6, false).unwrap();
    sim.arrive(i);
    sim.allocate(i, 0);
    // Steps, a handshake, a connection, a read of 5 ms, done, its verdict, reports: a few milliseconds each.
    sim.run(ms(20));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    assert!(!sim.sent.iter().any(|m| matches!(m, PeerMessage::Release { .. } | PeerMessage::Done { more: true, .. })));
    sim.settle();
}
