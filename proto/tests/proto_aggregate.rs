//! Aggregation: counts from the readers, any order, repetitions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};

use kvferry_proto::ErrorKind;
use kvferry_proto::aggregate::{Aggregator, Outcome, RequestSide};
use kvferry_proto::stats::Stats;
use kvferry_proto::wire::{Cause, Message, RecvFailure, RecvRecord, ReportBatch, WorkerReport};
use kvferry_proto::{RankId, RequestId};
use proptest::prelude::*;

fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

fn ids(names: &[&str]) -> Vec<RequestId> {
    names.iter().map(|name| id(name)).collect()
}

fn engine(pp: u32, tp: u32) -> Vec<RankId> {
    (0..pp).flat_map(|pp| (0..tp).map(move |tp| RankId { pp, tp })).collect()
}

fn report(rank: RankId) -> WorkerReport {
    WorkerReport::new(rank)
}

fn sent(rank: RankId, names: &[&str]) -> WorkerReport {
    WorkerReport { finished_sending: ids(names), ..report(rank) }
}

fn received(rank: RankId, names: &[&str]) -> WorkerReport {
    WorkerReport { finished_recving: ids(names), ..report(rank) }
}

fn failed(rank: RankId, name: &str, cause: Cause, blocks: &[u32]) -> WorkerReport {
    let failure =
        RecvFailure { request: id(name), cause, message: format!("{cause} at {rank}"), invalid_blocks: blocks.into() };
    WorkerReport { finished_recving: ids(&[name]), failed_recving: vec![failure], ..report(rank) }
}

fn record(name: &str, bytes: u64) -> RecvRecord {
    RecvRecord {
        request: id(name),
        remote_request: id("remote"),
        blocks: 1,
        bytes,
        operations: 1,
        queued_us: 1,
        first_us: 1,
        transfer_us: 1,
        confirm_us: 1,
        cause: None,
    }
}

#[test]
fn a_request_ends_when_every_rank_across_tp_and_pp_has_reported() {
    let ranks = engine(2, 2);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    assert_eq!(a.poll(), None);
    for &rank in &ranks {
        assert_eq!(a.poll(), None);
        a.add(&received(rank, &["r"])).unwrap();
        a.add(&received(rank, &["r"])).unwrap();
    }
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.finished_recving, outcome.finished_sending), (ids(&["r"]), vec![]));
    assert_eq!((a.poll(), a.pending()), (None, 0));
    // Sends and receives of one id are different things.
    for &rank in &ranks {
        a.add(&sent(rank, &["r"])).unwrap();
    }
    assert_eq!(a.poll().unwrap().finished_sending, ids(&["r"]));
}

#[test]
fn any_failure_is_the_requests_failure_with_all_causes_and_the_union_of_blocks() {
    let ranks = engine(1, 4);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    a.add(&failed(ranks[2], "r", Cause::Timeout, &[9, 3])).unwrap();
    a.add(&received(ranks[0], &["r"])).unwrap();
    a.add(&failed(ranks[1], "r", Cause::PeerDied, &[3, 4])).unwrap();
    // A rank that says more later does not change what it said first.
    a.add(&failed(ranks[1], "r", Cause::Aborted, &[77])).unwrap();
    assert_eq!(a.poll(), None);
    // Failed, but not named as finished: over on that rank all the same.
    let mut last = failed(ranks[3], "r", Cause::Timeout, &[]);
    last.finished_recving.clear();
    a.add(&last).unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!(outcome.finished_recving, ids(&["r"]));
    let [failure] = &outcome.failed_recving[..] else { panic!("{outcome:?}") };
    assert_eq!(failure.request, id("r"));
    assert_eq!(
        failure.causes,
        [
            (ranks[1], Cause::PeerDied, "peer_died at (pp 0, tp 1)".into()),
            (ranks[2], Cause::Timeout, "timeout at (pp 0, tp 2)".into()),
            (ranks[3], Cause::Timeout, "timeout at (pp 0, tp 3)".into()),
        ]
    );
    assert_eq!(failure.invalid_blocks.ids(), [3, 4, 9]);
}

#[test]
fn sixteen_producers_of_which_four_are_read_end_with_four() {
    let ranks = engine(1, 16);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    a.expect(&id("before"), RequestSide::Send, 4).unwrap();
    for (index, &rank) in ranks.iter().step_by(4).enumerate() {
        assert_eq!(a.poll(), None, "{index}");
        a.add(&sent(rank, &["before", "after"])).unwrap();
    }
    assert_eq!(a.poll().unwrap().finished_sending, ids(&["before"]));
    // The count may become known last.
    a.expect(&id("after"), RequestSide::Send, 4).unwrap();
    assert_eq!(a.poll().unwrap().finished_sending, ids(&["after"]));
}

#[test]
fn one_producer_read_by_eight_ends_with_its_one_report_and_their_eight() {
    let mut producer = Aggregator::new(engine(1, 1)).unwrap();
    producer.add(&sent(RankId { pp: 0, tp: 0 }, &["r"])).unwrap();
    assert_eq!(producer.poll().unwrap().finished_sending, ids(&["r"]));
    let mut consumer = Aggregator::new(engine(1, 8)).unwrap();
    for rank in engine(1, 8).into_iter().rev() {
        assert_eq!(consumer.poll(), None);
        consumer.add(&received(rank, &["r"])).unwrap();
    }
    assert_eq!(consumer.poll().unwrap().finished_recving, ids(&["r"]));
}

#[test]
fn late_repetitions_do_not_revive_a_request_until_it_is_forgotten() {
    let ranks = engine(1, 2);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    for round in 0..3 {
        for &rank in &ranks {
            a.add(&failed(rank, "r", Cause::Timeout, &[1])).unwrap();
        }
        if round == 0 {
            assert_eq!(a.poll().unwrap().failed_recving.len(), 1);
        }
        assert_eq!((a.poll(), a.pending()), (None, 0));
        a.expect(&id("r"), RequestSide::Recv, 1).unwrap();
        assert_eq!((a.poll(), a.pending()), (None, 0));
    }
    a.forget(&id("r"));
    a.add(&received(ranks[0], &["r"])).unwrap();
    assert_eq!((a.poll(), a.pending()), (None, 1));
    a.add(&received(ranks[1], &["r"])).unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.finished_recving, outcome.failed_recving), (ids(&["r"]), vec![]));
    a.add(&received(ranks[0], &["half"])).unwrap();
    a.forget(&id("half"));
    assert_eq!(a.pending(), 0);
}

#[test]
fn what_the_host_ends_is_over_and_reports_of_it_are_late() {
    let ranks = engine(1, 2);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    a.add(&received(ranks[0], &["r"])).unwrap();
    a.add(&sent(ranks[0], &["r"])).unwrap();
    a.end(&id("r"), RequestSide::Recv);
    a.end(&id("unknown"), RequestSide::Recv);
    assert_eq!((a.poll(), a.pending()), (None, 1));
    a.add(&WorkerReport { stats: Stats { bytes: 5, ..Stats::default() }, ..received(ranks[1], &["r", "unknown"]) })
        .unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.finished_recving, outcome.stats.bytes, a.pending()), (vec![], 5, 1), "but its figures count");
    // The other direction is another thing, and a prefill that was sent is granted no more.
    a.end(&id("r"), RequestSide::Send);
    for &rank in &ranks {
        a.add(&WorkerReport { granted: ids(&["r"]), ..sent(rank, &["r"]) }).unwrap();
    }
    assert_eq!((a.poll(), a.pending()), (None, 0));
    a.forget_side(&id("r"), RequestSide::Recv);
    for &rank in &ranks {
        a.add(&received(rank, &["r"])).unwrap();
        a.add(&sent(rank, &["r"])).unwrap();
    }
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.finished_recving, outcome.finished_sending), (ids(&["r"]), vec![]));
}

#[test]
fn statistics_and_records_are_counted_once() {
    let ranks = engine(1, 2);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    let full = |rank: RankId, bytes: u64| WorkerReport {
        stats: Stats { bytes, ..Stats::default() },
        records: vec![record("r", bytes)],
        ..received(rank, &["r"])
    };
    for bytes in [10, 10, 10] {
        a.add(&full(ranks[0], bytes)).unwrap();
    }
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.stats.bytes, outcome.records), (10, vec![(ranks[0], record("r", 10))]));
    a.add(&full(ranks[1], 5)).unwrap();
    a.add(&full(ranks[0], 10)).unwrap();
    a.add(&full(ranks[1], 5)).unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.stats.bytes, outcome.records), (5, vec![(ranks[1], record("r", 5))]));
    // Old news beside news: the counters are the new report's, the record of the old request is not.
    let mut mixed = full(ranks[0], 7);
    mixed.finished_recving.push(id("s"));
    mixed.records.push(record("s", 7));
    a.add(&mixed).unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.stats.bytes, outcome.records), (7, vec![(ranks[0], record("s", 7))]));
    // Without any request in it a report cannot be told from its repetition.
    let counters = WorkerReport { stats: Stats { renewals: 1, ..Stats::default() }, ..report(ranks[0]) };
    a.add(&counters).unwrap();
    a.add(&counters).unwrap();
    assert_eq!(a.poll().unwrap().stats.renewals, 2);
}

#[test]
fn what_is_remembered_is_bounded() {
    let ranks = engine(1, 2);
    let mut a = Aggregator::with_limit(ranks.clone(), 2).unwrap();
    a.add(&received(ranks[0], &["a", "b"])).unwrap();
    let error = a.add(&received(ranks[0], &["c"])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.message().contains("limit of 2"), "{error}");
    assert_eq!(a.expect(&id("c"), RequestSide::Recv, 1).unwrap_err().kind(), ErrorKind::Exhausted);
    // Nothing of the refused report was taken; reports about known requests and the other direction go on.
    assert_eq!(a.pending(), 2);
    a.add(&sent(ranks[0], &["a"])).unwrap();
    a.add(&received(ranks[1], &["a"])).unwrap();
    assert_eq!(a.poll().unwrap().finished_recving, ids(&["a"]));
    a.add(&received(ranks[0], &["c"])).unwrap();
    for name in ["b", "c"] {
        a.add(&received(ranks[1], &[name])).unwrap();
    }
    assert_eq!(a.poll().unwrap().finished_recving, ids(&["b", "c"]));
    // Only the last two completed ones are still known: "a" begins anew, "c" does not.
    a.add(&received(ranks[0], &["a", "c"])).unwrap();
    a.add(&received(ranks[1], &["c", "a"])).unwrap();
    assert_eq!(a.poll().unwrap().finished_recving, ids(&["a"]));
}

#[test]
fn of_completed_requests_the_latest_are_remembered() {
    let ranks = engine(1, 1);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    let name = |n: usize| format!("r{n}");
    for n in 0..=4096 {
        a.add(&received(ranks[0], &[&name(n)])).unwrap();
    }
    assert_eq!(a.poll().unwrap().finished_recving.len(), 4097);
    // The oldest one is news again.
    a.add(&received(ranks[0], &[&name(1), &name(4096)])).unwrap();
    assert_eq!(a.poll(), None);
    a.add(&received(ranks[0], &[&name(0)])).unwrap();
    assert_eq!(a.poll().unwrap().finished_recving, ids(&[&name(0)]));
}

#[test]
fn wrong_ranks_and_counts_are_refused() {
    let empty = Aggregator::new([]).unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::InvalidArgument);
    assert_eq!(Aggregator::new(engine(65, 64)).unwrap_err().kind(), ErrorKind::Exhausted);
    let mut a = Aggregator::new(engine(1, 2)).unwrap();
    let stranger = RankId { pp: 1, tp: 0 };
    let error = a.add(&received(stranger, &["r"])).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("(pp 1, tp 0)"), "{error}");
    for count in [0, 3] {
        let error = a.expect(&id("r"), RequestSide::Recv, count).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("2 ranks"), "{error}");
    }
    assert_eq!((a.poll(), a.pending()), (None, 0));
}

/// What must not depend on order or repetition.
#[derive(Debug, Default, PartialEq)]
struct Essence {
    sent: BTreeSet<RequestId>,
    received: BTreeSet<RequestId>,
    failed: BTreeMap<RequestId, String>,
    records: BTreeSet<String>,
    stats: Stats,
}

fn essence(outcomes: Vec<Outcome>) -> Essence {
    let mut all = Essence::default();
    for outcome in outcomes {
        for request in outcome.finished_sending {
            assert!(all.sent.insert(request), "a send ended twice");
        }
        for request in outcome.finished_recving {
            assert!(all.received.insert(request), "a receive ended twice");
        }
        for failure in outcome.failed_recving {
            let text = format!("{:?} {:?}", failure.causes, failure.invalid_blocks);
            assert!(all.failed.insert(failure.request, text).is_none());
        }
        for record in outcome.records {
            assert!(all.records.insert(format!("{record:?}")), "a record came twice");
        }
        all.stats.merge(&outcome.stats);
    }
    all
}

/// One report per rank and request, so that a repetition is recognised; some fail.
fn history() -> impl Strategy<Value = (Vec<RankId>, Vec<WorkerReport>)> {
    (1u32..4, 1u32..5, prop::collection::vec((any::<bool>(), any::<u64>()), 1..6)).prop_map(|(pp, tp, requests)| {
        let ranks = engine(pp, tp);
        let mut reports = vec![];
        for (n, (send, seed)) in requests.into_iter().enumerate() {
            let name = format!("r{n}");
            for (i, &rank) in ranks.iter().enumerate() {
                let bits = seed >> (i * 5 % 59);
                let mut one = match (send, bits & 3) {
                    (true, _) => sent(rank, &[&name]),
                    (false, 0) => {
                        failed(rank, &name, Cause::ALL[(bits >> 2) as usize % 9], &[(bits % 50) as u32, i as u32])
                    }
                    (false, _) => received(rank, &[&name]),
                };
                one.stats.bytes = bits % 1000;
                if !send {
                    one.records.push(record(&name, bits % 1000));
                }
                // Some ranks never report.
                if bits & 0x1f != 0x1f {
                    reports.push(one);
                }
            }
        }
        (ranks, reports)
    })
}

fn aggregate(ranks: &[RankId], reports: impl IntoIterator<Item = WorkerReport>) -> Vec<Outcome> {
    let mut a = Aggregator::new(ranks.iter().copied()).unwrap();
    let mut outcomes = vec![];
    for report in reports {
        a.add(&report).unwrap();
        outcomes.extend(a.poll());
    }
    outcomes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn order_repetition_and_grouping_change_nothing(
        (ranks, reports) in history(),
        shuffle in any::<u64>(),
        repeats in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let plain = essence(aggregate(&ranks, reports.clone()));
        // What has ended is what every rank has reported.
        for (done, of) in [(&plain.sent, true), (&plain.received, false)] {
            let mut counts: BTreeMap<&RequestId, usize> = BTreeMap::new();
            for r in &reports {
                let list = if of { &r.finished_sending } else { &r.finished_recving };
                list.iter().for_each(|request| *counts.entry(request).or_default() += 1);
            }
            let expected: BTreeSet<RequestId> =
                counts.into_iter().filter(|&(_, n)| n == ranks.len()).map(|(r, _)| r.clone()).collect();
            prop_assert_eq!(done, &expected);
        }
        let mut mixed = reports.clone();
        if !reports.is_empty() {
            mixed.extend(repeats.iter().map(|at| reports[at.index(reports.len())].clone()));
        }
        let mut state = shuffle | 1;
        for i in (1..mixed.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            mixed.swap(i, (state >> 33) as usize % (i + 1));
        }
        prop_assert_eq!(&essence(aggregate(&ranks, mixed.clone())), &plain);
        // Batched by the host first, in any grouping.
        let cut = (shuffle as usize) % (reports.len() + 1);
        let mut a = Aggregator::new(ranks.clone()).unwrap();
        let mut outcomes = vec![];
        for part in [&reports[..cut], &reports[cut..]] {
            let mut batch = ReportBatch::new();
            part.iter().cloned().for_each(|r| batch.add(r));
            a.add_batch(&batch).unwrap();
            outcomes.extend(a.poll());
        }
        prop_assert_eq!(&essence(outcomes), &plain);
    }

    #[test]
    fn batches_are_a_commutative_monoid((_, reports) in history(), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>()) {
        let batch = |reports: &[WorkerReport]| {
            let mut batch = ReportBatch::new();
            reports.iter().cloned().for_each(|r| batch.add(r));
            batch
        };
        let merged = |mut x: ReportBatch, y: &ReportBatch| {
            x.merge(y.clone());
            x
        };
        let (a, b) = (a.index(reports.len() + 1), b.index(reports.len() + 1));
        let (x, y, z) = (batch(&reports[..a.min(b)]), batch(&reports[a.min(b)..a.max(b)]), batch(&reports[a.max(b)..]));
        prop_assert_eq!(merged(merged(x.clone(), &y), &z), merged(x.clone(), &merged(y.clone(), &z)));
        prop_assert_eq!(merged(x.clone(), &y), merged(y.clone(), &x));
        prop_assert_eq!(merged(x.clone(), &ReportBatch::new()), x.clone());
        prop_assert_eq!(merged(ReportBatch::new(), &x), x.clone());
        // Overlapping batches too: what a rank said twice is there once.
        prop_assert_eq!(merged(merged(x.clone(), &y), &x), merged(x.clone(), &merged(x.clone(), &y)));
        let bytes = x.to_bytes().unwrap();
        prop_assert_eq!(ReportBatch::from_bytes(&bytes).unwrap(), x);
    }
}

#[test]
fn contradicting_failures_of_one_rank_merge_the_same_either_way() {
    let rank = RankId { pp: 0, tp: 0 };
    let (a, b) = (failed(rank, "r", Cause::Timeout, &[5, 1]), failed(rank, "r", Cause::PeerDied, &[2, 5]));
    let merge = |first: &WorkerReport, second: &WorkerReport| {
        let mut batch = ReportBatch::from(first.clone());
        batch.add(second.clone());
        batch
    };
    assert_eq!(merge(&a, &b), merge(&b, &a));
    let merged = merge(&a, &b);
    let failure = &merged.reports().next().unwrap().failed_recving[0];
    assert_eq!((failure.cause, failure.invalid_blocks.ids()), (Cause::PeerDied, &[1, 2, 5][..]));
    assert!(!merged.is_empty() && ReportBatch::new().is_empty());
}

#[test]
fn a_prefill_can_be_read_when_every_rank_has_its_grant() {
    let ranks = engine(2, 2);
    let mut a = Aggregator::new(ranks.clone()).unwrap();
    let granted = |rank: RankId, names: &[&str]| WorkerReport { granted: ids(names), ..report(rank) };
    for &rank in &ranks[..3] {
        a.add(&granted(rank, &["x", "y"])).unwrap();
        a.add(&granted(rank, &["x"])).unwrap();
        assert_eq!(a.poll(), None, "one rank is missing, however often the others say it");
    }
    // In the same report as its end, on one rank by itself, and with another rank's of another request.
    let last = WorkerReport { finished_sending: ids(&["x"]), ..granted(ranks[3], &["x"]) };
    a.add_batch(&{
        let mut batch = ReportBatch::from(last.clone());
        batch.merge(granted(ranks[0], &["z"]).into());
        batch
    })
    .unwrap();
    let outcome = a.poll().unwrap();
    assert_eq!((outcome.granted, outcome.finished_sending.len()), (ids(&["x"]), 0));
    a.add(&last).unwrap();
    assert_eq!(a.poll(), None);
    a.add(&granted(ranks[3], &["y"])).unwrap();
    assert_eq!(a.poll().unwrap().granted, ids(&["y"]));
    // As many as are remembered, and a name that is used again.
    let mut small = Aggregator::with_limit(engine(1, 2), 1).unwrap();
    small.add(&granted(RankId { pp: 0, tp: 0 }, &["x"])).unwrap();
    let full = small.add(&granted(RankId { pp: 0, tp: 0 }, &["y"])).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Exhausted);
    small.forget(&id("x"));
    small.add(&granted(RankId { pp: 0, tp: 0 }, &["y"])).unwrap();
}
