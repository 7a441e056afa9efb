//! The rules one by one, of prefills that are over when their load comes.

use kvferry_proto::scheduler::FinishOutcome;
use kvferry_proto::wire::{Cause, PeerMessage};

use crate::sim::{LEASE_MS, Sim, ms};

/// P has prefilled a prompt of so many blocks.
fn prefilled(blocks: usize) -> (Sim, usize) {
    let mut sim = Sim::new();
    let i = sim.prefill(blocks, false).unwrap();
    (sim, i)
}

#[test]
fn a_request_is_handed_over_and_both_sides_forget_it() {
    let (mut sim, i) = prefilled(6);
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
fn a_held_request_outlives_many_leases() {
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(4);
    sim.run(ms(LEASE_MS + 100));
    assert_eq!(sim.p_kept(), 0);
    sim.allocate(i, 0);
    sim.run(ms(100));
    assert_eq!(sim.outcome(i), Some(Err(Cause::LeaseExpired)));
    sim.settle();
}

#[test]
fn a_lease_that_expires_under_the_read_fails_it() {
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(4);
    sim.transfer_time = ms(60_000);
    sim.allocate(i, 0);
    sim.run(ms(5_100));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Err(Cause::Timeout)), 0));
    sim.settle();
}

#[test]
fn a_verdict_that_does_not_come_fails_the_load() {
    let (mut sim, i) = prefilled(4);
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
    let (mut sim, i) = prefilled(6);
    sim.arrive(i);
    sim.allocate(i, 0);
    // Steps, a handshake, a connection, a read of 5 ms, done, its verdict, reports: a few milliseconds each.
    sim.run(ms(20));
    assert_eq!((sim.outcome(i), sim.p_kept()), (Some(Ok(())), 0));
    assert!(!sim.sent.iter().any(|m| matches!(m, PeerMessage::Release { .. } | PeerMessage::Done { more: true, .. })));
    sim.settle();
}
