//! What ranks report, and what is over then.

use super::*;

/// An engine of two pipeline stages with two ranks each.
fn four_ranks() -> (SchedulerMachine, Vec<RankId>) {
    let config = SchedulerMachineConfig { tp_size: 2, pp_size: 2, ..config() };
    let ranks: Vec<RankId> = config.shape().rank_ids().collect();
    let mut s = SchedulerMachine::new(config).unwrap();
    s.set_address("10.1.2.3", 5680);
    (s, ranks)
}

fn grant(s: &mut SchedulerMachine, request: &str, params: &TransferParams) {
    assert!(s.finished(&id(request), params, FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap().keep);
}

fn load(s: &mut SchedulerMachine, request: &str) {
    s.allocated(&id(request), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
}

/// Whether the machine counts the request's load as under way: its end would have to wait for a report.
fn is_loading(s: &mut SchedulerMachine, request: &str) -> bool {
    s.finished(&id(request), &offered(), FinishOutcome::Complete, vec![], 0).unwrap().keep
}

#[test]
fn what_every_rank_has_reported_is_over_and_nothing_before() {
    let (mut s, ranks) = four_ranks();
    assert_eq!(ranks, [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(pp, tp)| RankId { pp, tp }));
    grant(&mut s, "p-1", &named("x-1"));
    load(&mut s, "d");
    let mut last = Outcome::default();
    for (index, &rank) in ranks.iter().rev().enumerate() {
        assert_eq!((s.poll_notice(), s.sending()), (None, 1));
        let report: ReportBatch = WorkerReport {
            granted: vec![id("p-1")],
            finished_recving: vec![id("d")],
            stats: Stats { bytes: 10, ..Stats::default() },
            ..WorkerReport::new(rank)
        }
        .into();
        last = s.on_report(&report).unwrap();
        assert_eq!(last.stats.bytes, 10, "figures are told as they come");
        let all = index + 1 == ranks.len();
        assert_eq!((last.granted.is_empty(), last.finished_recving.is_empty()), (!all, !all));
        // The same once more is neither another rank nor counted again.
        assert_eq!(s.on_report(&report).unwrap(), Outcome::default());
    }
    assert_eq!((&last.granted[..], &last.finished_recving[..]), (&[id("p-1")][..], &[id("d")][..]));
    assert!(matches!(s.poll_notice(), Some(PrefillNotice::Ready(prefill)) if prefill.request == id("x-1")));
    assert!(!is_loading(&mut s, "d"));
    // Merged by the host on the way, in any grouping.
    let batch = |ranks: &[RankId]| {
        let mut batch = ReportBatch::new();
        for &rank in ranks {
            batch.add(WorkerReport { finished_sending: vec![id("p-1")], ..WorkerReport::new(rank) });
        }
        batch
    };
    assert_eq!(s.on_report(&batch(&ranks[1..])).unwrap(), Outcome::default());
    assert_eq!(s.sending(), 1);
    assert_eq!(s.on_report(&batch(&ranks[..2])).unwrap().finished_sending, [id("p-1")]);
    assert_eq!((s.poll_notice(), s.sending(), s.receiving()), (Some(PrefillNotice::Gone(id("x-1"))), 0, 0));
}

#[test]
fn a_receive_that_any_rank_failed_has_failed_with_every_ranks_cause_and_blocks() {
    let (mut s, ranks) = four_ranks();
    load(&mut s, "d");
    let mut outcome = Outcome::default();
    for (&rank, failed) in
        ranks.iter().zip([None, Some((Cause::Timeout, [9, 3])), None, Some((Cause::PeerDied, [3, 4]))])
    {
        assert!(outcome.finished_recving.is_empty(), "the other ranks may still write");
        let failed_recving = failed
            .map(|(cause, blocks)| RecvFailure {
                request: id("d"),
                cause,
                message: format!("at {rank}"),
                invalid_blocks: Blocks::from(blocks.as_slice()),
            })
            .into_iter()
            .collect();
        let report = WorkerReport { finished_recving: vec![id("d")], failed_recving, ..WorkerReport::new(rank) };
        outcome = s.on_report(&report.into()).unwrap();
    }
    let [failure] = &outcome.failed_recving[..] else { panic!("{outcome:?}") };
    assert_eq!((&failure.request, failure.invalid_blocks.ids()), (&id("d"), &[3, 4, 9][..]));
    let causes: Vec<(RankId, Cause)> = failure.causes.iter().map(|&(rank, cause, _)| (rank, cause)).collect();
    assert_eq!(causes, [(ranks[1], Cause::Timeout), (ranks[3], Cause::PeerDied)]);
    assert!(!is_loading(&mut s, "d"));
}

#[test]
fn a_report_of_a_rank_that_the_engine_has_not_is_refused_and_changes_nothing() {
    let (mut s, ranks) = four_ranks();
    grant(&mut s, "p-1", &asked());
    let sent = |rank| WorkerReport { finished_sending: vec![id("p-1")], ..WorkerReport::new(rank) };
    for stranger in [RankId { pp: 2, tp: 0 }, RankId { pp: 0, tp: 2 }, RankId { pp: u32::MAX, tp: u32::MAX }] {
        let error = s.on_report(&sent(stranger).into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(&stranger.to_string()) && error.message().contains("engine's 4"), "{error}");
    }
    // What came with it in a batch is not lost.
    let mut batch = ReportBatch::from(sent(RankId { pp: 2, tp: 0 }));
    ranks.iter().for_each(|&rank| batch.add(sent(rank)));
    assert_eq!(s.on_report(&batch).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let outcome = s.on_report(&WorkerReport::new(ranks[0]).into()).unwrap();
    assert_eq!((outcome.finished_sending, s.sending()), (vec![id("p-1")], 0));
    let huge =
        SchedulerMachine::new(SchedulerMachineConfig { tp_size: u32::MAX, pp_size: u32::MAX, ..config() }).unwrap_err();
    assert!(huge.message().contains("at most 4096"), "{huge}");
}

#[test]
fn a_rank_that_never_reports_keeps_its_requests_until_the_host_says_that_they_are_over() {
    let (mut s, ranks) = four_ranks();
    grant(&mut s, "p-1", &named("x-1"));
    load(&mut s, "d");
    load(&mut s, "e");
    assert!(is_loading(&mut s, "e"));
    let report = |rank| WorkerReport {
        finished_sending: vec![id("p-1")],
        finished_recving: vec![id("d"), id("e")],
        stats: Stats { bytes: 10, ..Stats::default() },
        ..WorkerReport::new(rank)
    };
    for &rank in &ranks[1..] {
        assert!(s.on_report(&report(rank).into()).unwrap().finished_sending.is_empty());
    }
    assert_eq!((s.sending(), s.receiving(), s.poll_notice()), (1, 2, None));
    for _ in 0..2 {
        s.over(&id("p-1"), RequestSide::Send);
        s.over(&id("d"), RequestSide::Recv);
        s.over(&id("e"), RequestSide::Recv);
        s.over(&id("stranger"), RequestSide::Recv);
    }
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(PrefillNotice::Gone(id("x-1"))), None));
    assert!(!is_loading(&mut s, "d"));
    assert_eq!((s.sending(), s.receiving()), (0, 0));
    // The late report is old news but for its figures.
    let late = s.on_report(&report(ranks[0]).into()).unwrap();
    assert_eq!(late, Outcome { stats: Stats { bytes: 10, ..Stats::default() }, ..Outcome::default() });
}

#[test]
fn an_id_that_is_used_again_is_a_request_of_its_own() {
    let (mut s, ranks) = four_ranks();
    for round in 0..3 {
        grant(&mut s, "r", &named("x"));
        load(&mut s, "d");
        let report = |rank| WorkerReport {
            granted: vec![id("r")],
            finished_sending: vec![id("r")],
            finished_recving: vec![id("d")],
            ..WorkerReport::new(rank)
        };
        if round == 1 {
            // One rank's report came before the host said so, and the others' never do.
            s.on_report(&report(ranks[0]).into()).unwrap();
            s.over(&id("r"), RequestSide::Send);
            s.over(&id("d"), RequestSide::Recv);
        } else {
            for &rank in &ranks {
                assert_eq!(s.sending(), 1);
                s.on_report(&report(rank).into()).unwrap();
            }
            assert!(matches!(s.poll_notice(), Some(PrefillNotice::Ready(_))));
        }
        assert_eq!((s.poll_notice(), s.poll_notice()), (Some(PrefillNotice::Gone(id("x"))), None));
        assert!(!is_loading(&mut s, "d"));
        assert_eq!((s.sending(), s.receiving()), (0, 0));
    }
}
