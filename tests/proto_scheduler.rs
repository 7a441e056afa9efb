//! The scheduler side's state machine, call by call.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use kvferry::ErrorKind;
use kvferry::proto::aggregate::{Direction, Outcome};
use kvferry::proto::geometry::{Group, GroupKind};
use kvferry::proto::ids::{EngineId, Incarnation, RankId, RequestId};
use kvferry::proto::scheduler::{FinishOutcome, Match, Notice, Scheduler, SchedulerConfig};
use kvferry::proto::stats::Stats;
use kvferry::proto::wire::limits::MAX_BLOCK_IDS;
use kvferry::proto::wire::{
    Blocks, Cause, Message, Prefill, RecvFailure, ReportBatch, StepMetadata, TransferParams, WorkerReport,
};

fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

/// A full group of 4 tokens a block, and a window of 6 tokens: at most 3 blocks.
fn config() -> SchedulerConfig {
    SchedulerConfig::new(
        EngineId::new("p").unwrap(),
        Incarnation(0xABC),
        vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::SlidingWindow { window: 6 }, 4)],
    )
}

fn scheduler() -> Scheduler {
    let mut s = Scheduler::new(config()).unwrap();
    s.set_address("10.1.2.3", 5680);
    s
}

fn lists(full: &[u32], window: &[u32]) -> Vec<Blocks> {
    vec![Blocks::from(full), Blocks::from(window)]
}

fn asked() -> TransferParams {
    TransferParams { do_remote_decode: true, ..Default::default() }
}

/// Params of a prompt of 18 tokens: 5 blocks.
fn offered() -> TransferParams {
    TransferParams {
        do_remote_prefill: true,
        remote_engine_id: Some("p".into()),
        remote_incarnation: Some("0000000000000abc".into()),
        remote_request_id: Some("p-1".into()),
        remote_host: Some("10.1.2.3".into()),
        remote_port: Some(5680),
        remote_block_ids: Some(vec![vec![11, 12, 13, 14, 15], vec![23, 24, 25]]),
        remote_num_tokens: Some(18),
        remote_lease_ms: Some(30_000),
        remote_lease_id: Some(4),
        transfer_mode: Some("pull".into()),
        ..Default::default()
    }
}

fn over(recving: &[&str], sending: &[&str]) -> WorkerReport {
    WorkerReport {
        finished_sending: sending.iter().map(|n| id(n)).collect(),
        finished_recving: recving.iter().map(|n| id(n)).collect(),
        ..WorkerReport::new(RankId { pp: 0, tp: 0 })
    }
}

fn granted(names: &[&str]) -> WorkerReport {
    WorkerReport { granted: names.iter().map(|n| id(n)).collect(), ..WorkerReport::new(RankId { pp: 0, tp: 0 }) }
}

#[test]
fn a_complete_prefill_is_kept_granted_and_offered() {
    let mut s = scheduler();
    let blocks = lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    let finish = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, blocks, 18).unwrap();
    assert!(finish.keep && s.has_pending());
    let p = finish.params.unwrap();
    assert_eq!((p.do_remote_prefill, p.do_remote_decode), (true, false));
    assert_eq!(p.remote_block_ids, Some(vec![vec![11, 12, 13, 14, 15], vec![23, 24, 25]]));
    assert_eq!((p.remote_host.as_deref(), p.remote_port), (Some("10.1.2.3"), Some(5680)));
    assert_eq!((p.remote_engine_id.as_deref(), p.remote_request_id.as_deref()), (Some("p"), Some("p-1")));
    assert_eq!(p.remote_incarnation.as_deref(), Some("0000000000000abc"));
    assert_eq!((p.remote_num_tokens, p.remote_lease_ms, p.remote_lease_id), (Some(18), Some(30_000), Some(1)));
    assert_eq!((p.tp_size, p.pp_size, p.dcp_size), (Some(1), Some(1), Some(1)));
    assert_eq!(p.transfer_mode.as_deref(), Some("pull"));
    let step = StepMetadata::from_bytes(&s.encode_step().unwrap()).unwrap();
    assert_eq!((step.grants[0].request.as_str(), step.grants[0].lease_ms, step.grants[0].lease_id), ("p-1", 30_000, 1));
    assert!(!s.has_pending() && s.build_step().is_empty());
    let again = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    assert_eq!((s.sending(), s.stats().sending, s.stats().receiving), (1, 1, 0));
    s.on_report(&over(&[], &["p-1", "stranger"])).unwrap();
    assert_eq!((s.sending(), s.stats().sending), (0, 0));
    let mut d = scheduler();
    d.arrived(&id("d-1"), &p).unwrap();
    assert_eq!(d.build_step().holds[0].remote.lease_id, 1, "what P offers, D understands");
}

#[test]
fn ids_of_leases_are_as_random_as_what_the_driver_gives_and_fit_json() {
    let mut s = scheduler();
    let most = (1 << 53) - 1;
    for (n, (random, id_of)) in
        [(0, 1), (most - 1, most), (most, 1), (u64::MAX, (u64::MAX % most) + 1), (77, 78)].into_iter().enumerate()
    {
        s.set_lease_entropy(random);
        let lists = lists(&[11], &[23]);
        let finish = s.finished(&id(&format!("p-{n}")), &asked(), FinishOutcome::Complete, lists, 4).unwrap();
        assert_eq!(finish.params.unwrap().remote_lease_id, Some(id_of as i64));
        assert_eq!(s.build_step().grants[0].lease_id, id_of);
    }
}

#[test]
fn requests_that_others_may_follow_are_marked_for_the_workers() {
    let mut d = scheduler();
    for (name, shared) in [("a", None), ("b", Some(false)), ("c", Some(true))] {
        let params = TransferParams { shared, ..offered() };
        d.arrived(&id(name), &params).unwrap();
        d.allocated(&id(name), &params, lists(&[1, 2, 3, 4, 5], &[7, 8, 9]), 18, 18).unwrap();
        d.finished(&id(&format!("{name}-unknown")), &params, FinishOutcome::Aborted, vec![], 0).unwrap();
        let step = d.build_step();
        let marks = [step.holds[0].remote.shared, step.loads[0].remote.shared, step.releases[0].remote.shared];
        assert_eq!(marks, [shared == Some(true); 3]);
    }
}

/// What a prefill engine is given by a proxy that asks both at once.
fn named(transfer_id: &str) -> TransferParams {
    TransferParams { transfer_id: Some(transfer_id.into()), ..asked() }
}

/// What a decode engine is given then.
fn announced() -> TransferParams {
    TransferParams {
        do_remote_prefill: true,
        transfer_id: Some("x-1".into()),
        remote_engine_id: Some("p".into()),
        remote_host: Some("10.1.2.3".into()),
        remote_port: Some(5680),
        ..Default::default()
    }
}

#[test]
fn a_named_prefill_is_known_by_its_name_and_who_awaits_it_is_told() {
    let mut s = scheduler();
    let blocks = || lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    let finish = s.finished(&id("p-1"), &named("x-1"), FinishOutcome::Complete, blocks(), 18).unwrap();
    let params = finish.params.unwrap();
    assert_eq!((params.remote_request_id.as_deref(), params.transfer_id), (Some("x-1"), None));
    let prefill = Prefill {
        request: id("x-1"),
        blocks: lists(&[11, 12, 13, 14, 15], &[23, 24, 25]),
        tokens: 18,
        lease_ms: 30_000,
        lease_id: 1,
    };
    assert_eq!(s.poll_notice(), None, "no worker has the grant yet");
    s.on_report(&granted(&["x-1", "stranger"])).unwrap();
    assert_eq!(s.poll_notice(), None, "workers use the engine's own names");
    s.on_report(&granted(&["p-1"])).unwrap();
    s.on_report(&granted(&["p-1"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(Notice::Ready(prefill)), None));
    // The name is taken, whoever has it.
    for taken in [named("x-1"), TransferParams { transfer_id: None, ..asked() }] {
        let request = if taken.transfer_id.is_some() { "p-2" } else { "x-1" };
        let error = s.finished(&id(request), &taken, FinishOutcome::Complete, blocks(), 18).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("transfer_id"), "{error}");
    }
    let step = s.build_step();
    assert_eq!((step.grants[0].request.as_str(), step.grants[0].name.clone()), ("p-1", Some(id("x-1"))));
    assert_eq!((step.grants.len(), step.dropped.len(), s.poll_notice()), (1, 0, None));
    s.on_report(&over(&[], &["p-1"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice(), s.sending()), (Some(Notice::Gone(id("x-1"))), None, 0));
    // Without a hand-over: aborted, nothing computed, and a number of lists that is wrong.
    for (outcome, blocks, dropped) in [
        (FinishOutcome::Aborted, blocks(), true),
        (FinishOutcome::Complete, lists(&[], &[]), true),
        (FinishOutcome::Complete, vec![], false),
    ] {
        assert_eq!(s.finished(&id("p-3"), &named("x-3"), outcome, blocks, 18).is_ok(), dropped);
        assert_eq!((s.poll_notice(), s.poll_notice()), (Some(Notice::Gone(id("x-3"))), None));
        assert_eq!(s.build_step().dropped, if dropped { vec![id("x-3")] } else { vec![] });
    }
    // One that is over before all ranks have confirmed it.
    s.finished(&id("p-6"), &named("x-6"), FinishOutcome::Complete, blocks(), 18).unwrap();
    s.on_report(&over(&[], &["p-6"])).unwrap();
    s.on_report(&granted(&["p-6"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(Notice::Gone(id("x-6"))), None));
    // A request without a name is nobody's to await.
    s.finished(&id("p-4"), &asked(), FinishOutcome::Complete, blocks(), 18).unwrap();
    s.on_report(&granted(&["p-4"])).unwrap();
    s.on_report(&over(&[], &["p-4"])).unwrap();
    assert_eq!(s.poll_notice(), None);
    for unusable in [String::new(), "x".repeat(513)] {
        let error = s.finished(&id("p-5"), &named(&unusable), FinishOutcome::Complete, blocks(), 18).unwrap_err();
        assert!(error.message().contains("request p-5") && error.message().contains("transfer_id"), "{error}");
    }
}

#[test]
fn a_request_may_come_before_its_prefill_is_over() {
    let mut s = scheduler();
    s.arrived(&id("d-1"), &announced()).unwrap();
    assert_eq!(s.matched(&id("d-1"), &announced(), 18, 4).unwrap(), Match { tokens: 14, asynchronous: true });
    s.allocated(&id("d-1"), &announced(), lists(&[1, 2, 3, 4], &[5, 6]), 18, 14).unwrap();
    let step = s.build_step();
    assert_eq!((step.holds[0].remote.request.as_str(), step.holds[0].remote.lease_id), ("x-1", 0));
    let load = &step.loads[0];
    assert!(load.awaits && load.remote_blocks.is_empty() && load.refused.is_none());
    assert_eq!((load.remote.request.as_str(), load.tokens), ("x-1", (4, 18)));
    // All of it is there already: the prefill is given back by its name.
    s.arrived(&id("d-2"), &announced()).unwrap();
    s.allocated(&id("d-2"), &announced(), lists(&[], &[]), 18, 0).unwrap();
    assert_eq!(s.build_step().releases[0].remote.request.as_str(), "x-1");
    // With what an answer has, that counts.
    let both = TransferParams { transfer_id: Some("x-1".into()), ..offered() };
    s.allocated(&id("d-3"), &both, lists(&[1, 2, 3, 4, 5], &[6, 7, 8]), 18, 18).unwrap();
    let load = &s.build_step().loads[0];
    assert_eq!((load.awaits, load.remote.request.as_str(), load.remote_blocks.len()), (false, "p-1", 2));

    type Change = fn(&mut TransferParams);
    let wrong: [(Change, &[&str]); 4] = [
        (|p| p.remote_host = None, &["needs remote_host, which is missing", "earlier answer"]),
        (|p| (p.remote_engine_id, p.remote_port) = (None, None), &["remote_engine_id, remote_port, which are missing"]),
        (|p| p.transfer_id = Some(String::new()), &["transfer_id:"]),
        (|p| p.transfer_id = None, &["remote_request_id, remote_block_ids", "or name the request to both"]),
    ];
    for (change, texts) in wrong {
        let mut params = announced();
        change(&mut params);
        let error = s.arrived(&id("d-4"), &params).unwrap_err();
        assert!(texts.iter().all(|text| error.message().contains(text)), "{error}");
        assert_eq!(s.matched(&id("d-4"), &params, 18, 0).unwrap_err(), error);
    }
}

#[test]
fn blocks_beyond_the_computed_tokens_and_outside_the_window_are_not_offered() {
    let mut s = scheduler();
    let blocks = lists(&[11, 12, 13, 14, 15, 16, 17], &[0, 21, 22, 23, 24, 25, 26]);
    let p = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, blocks, 18).unwrap().params.unwrap();
    assert_eq!(p.remote_block_ids, Some(vec![vec![11, 12, 13, 14, 15], vec![22, 23, 24]]));
}

#[test]
fn prefills_that_abort_or_have_no_blocks_are_dropped() {
    let mut s = scheduler();
    let aborted = s.finished(&id("a"), &asked(), FinishOutcome::Aborted, lists(&[1], &[2]), 4).unwrap();
    let empty = s.finished(&id("b"), &asked(), FinishOutcome::Complete, lists(&[], &[]), 4).unwrap();
    let nulls = s.finished(&id("c"), &asked(), FinishOutcome::Complete, lists(&[], &[0]), 4).unwrap();
    for finish in [aborted, empty, nulls] {
        assert_eq!((finish.keep, finish.params), (false, None));
    }
    let step = s.build_step();
    assert_eq!((step.dropped.len(), step.grants.len(), s.sending()), (3, 0, 0));
    let plain = s.finished(&id("d"), &TransferParams::default(), FinishOutcome::Complete, lists(&[1], &[2]), 4);
    assert!(!plain.unwrap().keep && !s.has_pending(), "a request without params is none of ours");
}

#[test]
fn a_name_that_is_dropped_and_used_again_in_one_step_is_granted() {
    let mut s = scheduler();
    let blocks = || lists(&[1, 2], &[3, 4]);
    s.finished(&id("r"), &asked(), FinishOutcome::Aborted, blocks(), 4).unwrap();
    assert!(s.finished(&id("r"), &asked(), FinishOutcome::Complete, blocks(), 4).unwrap().keep);
    let step = s.build_step();
    assert_eq!((step.grants.len(), step.dropped.len()), (1, 0), "the drop would end the lease that is granted");
}

#[test]
fn a_hand_over_without_a_listener_is_an_error_that_keeps_nothing() {
    let mut s = Scheduler::new(config()).unwrap();
    let e = s.finished(&id("a"), &asked(), FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap_err();
    assert!(e.message().contains("serve"), "{e}");
    assert!(!s.has_pending() && s.sending() == 0);
    let mut s = scheduler();
    let e = s.finished(&id("a"), &asked(), FinishOutcome::Complete, vec![Blocks::from(vec![1])], 4).unwrap_err();
    assert!(e.message().contains("2 KV-cache groups, got 1"), "{e}");
}

#[test]
fn arriving_holds_and_allocating_loads_once() {
    let mut s = scheduler();
    s.arrived(&id("d"), &TransferParams::default()).unwrap();
    assert!(!s.has_pending());
    s.arrived(&id("d"), &offered()).unwrap();
    s.arrived(&id("d"), &offered()).unwrap();
    let step = s.build_step();
    assert_eq!(step.holds.len(), 1);
    let remote = &step.holds[0].remote;
    assert_eq!((remote.engine.as_str(), remote.request.as_str(), remote.port), ("p", "p-1", 5680));
    assert_eq!((remote.incarnation, remote.lease_ms, remote.lease_id), (Some(Incarnation(0xABC)), 30_000, 4));
    assert_eq!(s.matched(&id("d"), &offered(), 18, 8).unwrap(), Match { tokens: 10, asynchronous: true });
    assert_eq!(s.matched(&id("d"), &offered(), 18, 18).unwrap(), Match::default());
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 0).unwrap();
    let step = s.build_step();
    assert_eq!((step.loads.len(), step.releases.len()), (1, 0));
    let load = &step.loads[0];
    assert_eq!(load.refused, None);
    assert_eq!((load.tokens, load.remote_tokens, load.null_block), ((8, 18), 18, Some(0)));
    assert_eq!(load.local_blocks, lists(&[1, 2, 3], &[0, 5, 6]));
    assert_eq!(load.remote_blocks, lists(&[11, 12, 13, 14, 15], &[23, 24, 25]));
    assert!(!load.window_only, "blocks are reused unless the host says that they are not");
    assert_eq!((s.stats().receiving, s.stats().sending), (1, 0));
    assert_eq!(s.matched(&id("d"), &offered(), 18, 0).unwrap(), Match::default(), "after a preemption too");
    s.on_report(&over(&["d", "stranger"], &[])).unwrap();
    let finish = s.finished(&id("d"), &offered(), FinishOutcome::Complete, vec![], 0).unwrap();
    assert!(!finish.keep && !s.has_pending(), "a loaded request owes nothing");
    assert_eq!(s.receiving(), 0);
}

#[test]
fn the_producer_may_have_other_groups_and_block_sizes() {
    let mut config = config();
    config.reuses_blocks = false;
    let mut s = Scheduler::new(config).unwrap();
    let params = TransferParams { remote_block_ids: Some(vec![vec![7]]), remote_num_tokens: Some(20), ..offered() };
    s.allocated(&id("d"), &params, lists(&[1, 2, 3, 4, 5], &[31, 32, 33, 34, 35]), 18, 18).unwrap();
    let load = &s.build_step().loads[0];
    assert_eq!((load.refused.as_ref(), load.tokens, load.remote_tokens, load.window_only), (None, (0, 18), 20, true));
    assert_eq!(load.remote_blocks, [Blocks::from(vec![7])]);
}

#[test]
fn blocks_that_the_tokens_do_not_fit_become_a_load_that_is_refused_by_name() {
    for (blocks, tokens, words) in [
        (
            lists(&[1, 2, 3, 4, 5, 6], &[]),
            18,
            "group 0: tokens 0 to 18 are to be loaded, which 5 blocks of 4 tokens hold",
        ),
        (lists(&[1, 2], &[]), 10, "group 0: tokens 8 to 18"),
        (lists(&[1, 2, 3, 4, 5], &[1; 6]), 18, "group 1: tokens 0 to 18"),
        (lists(&[1, 2, 3, 4, 5], &[]), 19, "19 tokens are to be loaded of 18"),
    ] {
        let mut s = scheduler();
        s.allocated(&id("d"), &offered(), blocks.clone(), 18, tokens).unwrap();
        let load = &s.build_step().loads[0];
        let text = load.refused.as_ref().expect("refused");
        assert!(text.contains(words), "{text}");
        assert_eq!(load.local_blocks, blocks, "all of them are suspect");
    }
    let e = scheduler().allocated(&id("d"), &offered(), vec![Blocks::default()], 18, 18).unwrap_err();
    assert!(e.message().contains("2 KV-cache groups, got 1"), "{e}");
}

#[test]
fn a_state_is_handed_over_one_token_before_the_end() {
    let config =
        SchedulerConfig { groups: vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::State, 1)], ..config() };
    let mut s = Scheduler::new(config.clone()).unwrap();
    s.set_address("10.1.2.3", 5680);
    let held = |n| TransferParams { remote_num_tokens: Some(n), ..offered() };
    let e = s.matched(&id("d"), &held(18), 18, 0).unwrap_err();
    assert!(e.message().contains("after 18 tokens, 17 are needed"), "{e}");
    assert_eq!(s.matched(&id("d"), &held(17), 18, 0).unwrap().tokens, 17);
    s.allocated(&id("d"), &held(17), lists(&[1, 2, 3, 4, 5], &[9]), 18, 17).unwrap();
    let load = &s.build_step().loads[0];
    assert_eq!((load.refused.as_ref(), load.tokens), (None, (0, 17)));
    let finish = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, lists(&[1, 2, 3, 4, 5], &[0, 6, 7]), 17);
    assert_eq!(finish.unwrap().params.unwrap().remote_block_ids, Some(vec![vec![1, 2, 3, 4, 5], vec![7]]));
}

#[test]
fn whatever_is_not_loaded_is_released() {
    let mut s = scheduler();
    s.arrived(&id("hit"), &offered()).unwrap();
    s.allocated(&id("hit"), &offered(), vec![], 18, 0).unwrap();
    let step = s.build_step();
    assert_eq!((step.holds.len(), step.releases.len()), (0, 1), "a hold that no step took is not sent any more");
    s.arrived(&id("waiting"), &offered()).unwrap();
    assert_eq!(s.build_step().holds.len(), 1);
    assert!(!s.finished(&id("waiting"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(!s.finished(&id("rejected"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(s.has_pending());
    let released: Vec<String> = s.build_step().releases.iter().map(|r| r.request.to_string()).collect();
    assert_eq!(released, ["waiting", "rejected"]);
    assert!(!s.finished(&id("hit"), &offered(), FinishOutcome::Complete, vec![], 0).unwrap().keep);
    assert!(!s.has_pending() && s.receiving() == 0);
    let broken = TransferParams { do_remote_prefill: true, ..Default::default() };
    assert!(!s.finished(&id("x"), &broken, FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(!s.has_pending(), "nobody to release to");
}

#[test]
fn a_request_that_ends_under_its_load_is_aborted_and_keeps_its_blocks() {
    let mut s = scheduler();
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    assert!(s.finished(&id("d"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(s.finished(&id("d"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    let step = s.build_step();
    assert_eq!((step.loads.len(), step.aborts), (1, vec![id("d")]));
    assert_eq!(s.receiving(), 1);
    s.on_report(&over(&["d"], &[])).unwrap();
    assert_eq!(s.receiving(), 0);
    s.allocated(&id("e"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    let _ = s.build_step();
    assert!(s.finished(&id("e"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    s.on_report(&over(&["e"], &[])).unwrap();
    assert!(!s.has_pending(), "an abort of what is over is not sent");
}

/// An engine of two pipeline stages with two ranks each.
fn four_ranks() -> (Scheduler, Vec<RankId>) {
    let config = SchedulerConfig { tp_size: 2, pp_size: 2, ..config() };
    let ranks: Vec<RankId> = config.shape().rank_ids().collect();
    let mut s = Scheduler::new(config).unwrap();
    s.set_address("10.1.2.3", 5680);
    (s, ranks)
}

fn grant(s: &mut Scheduler, request: &str, params: &TransferParams) {
    assert!(s.finished(&id(request), params, FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap().keep);
}

fn load(s: &mut Scheduler, request: &str) {
    s.allocated(&id(request), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
}

/// Whether the machine counts the request's load as under way: its end would have to wait for a report.
fn is_loading(s: &mut Scheduler, request: &str) -> bool {
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
        let report = WorkerReport {
            granted: vec![id("p-1")],
            finished_recving: vec![id("d")],
            stats: Stats { bytes: 10, ..Stats::default() },
            ..WorkerReport::new(rank)
        };
        last = s.on_report(&report).unwrap();
        assert_eq!(last.stats.bytes, 10, "figures are told as they come");
        let all = index + 1 == ranks.len();
        assert_eq!((last.granted.is_empty(), last.finished_recving.is_empty()), (!all, !all));
        // The same once more is neither another rank nor counted again.
        assert_eq!(s.on_report(&report).unwrap(), Outcome::default());
    }
    assert_eq!((&last.granted[..], &last.finished_recving[..]), (&[id("p-1")][..], &[id("d")][..]));
    assert!(matches!(s.poll_notice(), Some(Notice::Ready(prefill)) if prefill.request == id("x-1")));
    assert!(!is_loading(&mut s, "d"));
    // Merged by the host on the way, in any grouping.
    let batch = |ranks: &[RankId]| {
        let mut batch = ReportBatch::new();
        for &rank in ranks {
            batch.add(WorkerReport { finished_sending: vec![id("p-1")], ..WorkerReport::new(rank) });
        }
        batch
    };
    assert_eq!(s.on_batch(&batch(&ranks[1..])).unwrap(), Outcome::default());
    assert_eq!(s.sending(), 1);
    assert_eq!(s.on_batch(&batch(&ranks[..2])).unwrap().finished_sending, [id("p-1")]);
    assert_eq!((s.poll_notice(), s.sending(), s.receiving()), (Some(Notice::Gone(id("x-1"))), 0, 0));
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
        outcome = s.on_report(&report).unwrap();
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
        let error = s.on_report(&sent(stranger)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(&stranger.to_string()) && error.message().contains("engine's 4"), "{error}");
    }
    // What came with it in a batch is not lost.
    let mut batch = ReportBatch::from(sent(RankId { pp: 2, tp: 0 }));
    ranks.iter().for_each(|&rank| batch.add(sent(rank)));
    assert_eq!(s.on_batch(&batch).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let outcome = s.on_report(&WorkerReport::new(ranks[0])).unwrap();
    assert_eq!((outcome.finished_sending, s.sending()), (vec![id("p-1")], 0));
    let huge = Scheduler::new(SchedulerConfig { tp_size: u32::MAX, pp_size: u32::MAX, ..config() }).unwrap_err();
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
        assert!(s.on_report(&report(rank)).unwrap().finished_sending.is_empty());
    }
    assert_eq!((s.sending(), s.receiving(), s.poll_notice()), (1, 2, None));
    for _ in 0..2 {
        s.over(&id("p-1"), Direction::Send);
        s.over(&id("d"), Direction::Recv);
        s.over(&id("e"), Direction::Recv);
        s.over(&id("stranger"), Direction::Recv);
    }
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(Notice::Gone(id("x-1"))), None));
    assert!(!is_loading(&mut s, "d"));
    assert_eq!((s.sending(), s.receiving()), (0, 0));
    // The late report is old news but for its figures.
    let late = s.on_report(&report(ranks[0])).unwrap();
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
            s.on_report(&report(ranks[0])).unwrap();
            s.over(&id("r"), Direction::Send);
            s.over(&id("d"), Direction::Recv);
        } else {
            for &rank in &ranks {
                assert_eq!(s.sending(), 1);
                s.on_report(&report(rank)).unwrap();
            }
            assert!(matches!(s.poll_notice(), Some(Notice::Ready(_))));
        }
        assert_eq!((s.poll_notice(), s.poll_notice()), (Some(Notice::Gone(id("x"))), None));
        assert!(!is_loading(&mut s, "d"));
        assert_eq!((s.sending(), s.receiving()), (0, 0));
    }
}

#[test]
fn params_that_cannot_be_used_name_the_key() {
    type Change = fn(&mut TransferParams);
    let cases: [(&str, Change); 18] = [
        ("remote_engine_id", |p| p.remote_engine_id = None),
        ("remote_engine_id", |p| p.remote_engine_id = Some(String::new())),
        ("remote_request_id", |p| p.remote_request_id = None),
        ("remote_request_id", |p| p.remote_request_id = Some("x".repeat(10_000))),
        ("remote_host", |p| p.remote_host = None),
        ("remote_host", |p| p.remote_host = Some(String::new())),
        ("remote_port", |p| p.remote_port = None),
        ("remote_port", |p| p.remote_port = Some(0)),
        ("remote_port", |p| p.remote_port = Some(70_000)),
        ("remote_block_ids", |p| p.remote_block_ids = None),
        ("remote_lease_ms", |p| p.remote_lease_ms = Some(-1)),
        ("remote_lease_id", |p| p.remote_lease_id = Some(0)),
        ("remote_incarnation", |p| p.remote_incarnation = Some("abc".into())),
        ("remote_incarnation", |p| p.remote_incarnation = Some("+00000000000001f".into())),
        ("remote_incarnation", |p| p.remote_incarnation = Some("0000000000000000".into())),
        ("transfer_mode", |p| p.transfer_mode = Some("push".into())),
        ("do_remote_decode", |p| p.do_remote_decode = true),
        ("do_remote_prefill", |p| p.do_remote_decode = true),
    ];
    for (key, change) in cases {
        let mut s = scheduler();
        let mut params = offered();
        change(&mut params);
        for e in [
            s.arrived(&id("d"), &params).unwrap_err(),
            s.matched(&id("d"), &params, 18, 0).unwrap_err(),
            s.allocated(&id("d"), &params, lists(&[1], &[1]), 18, 4).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains(key) && e.message().contains("request d"), "{key}: {e}");
        }
        assert!(!s.has_pending() && s.receiving() == 0);
    }
    let nothing = TransferParams { do_remote_prefill: true, ..Default::default() };
    let e = scheduler().arrived(&id("d"), &nothing).unwrap_err();
    assert!(e.message().contains("remote_engine_id, remote_request_id, remote_host, remote_port, remote_block_ids"));
    assert!(e.message().contains("proxy must pass on"), "{e}");
}

#[test]
fn a_prompt_that_the_producer_does_not_hold_is_refused() {
    type Change = fn(&mut TransferParams);
    let cases: [(&str, Change); 5] = [
        ("remote_num_tokens: the producer holds 17 tokens", |p| p.remote_num_tokens = Some(17)),
        ("remote_num_tokens: expected 0 or more", |p| p.remote_num_tokens = Some(-18)),
        ("one list for each of the producer's KV-cache groups", |p| p.remote_block_ids = Some(vec![])),
        ("remote_block_ids[1][0]: expected a block id", |p| p.remote_block_ids = Some(vec![vec![1; 5], vec![-2]])),
        ("remote_block_ids[0][4]", |p| p.remote_block_ids = Some(vec![vec![1, 2, 3, 4, 1 << 32], vec![5]])),
    ];
    for (words, change) in cases {
        let mut params = offered();
        change(&mut params);
        let e = scheduler().matched(&id("d"), &params, 18, 0).unwrap_err();
        assert!(e.message().contains(words), "{e}");
    }
    let mut unsaid = offered();
    unsaid.remote_num_tokens = None;
    assert_eq!(scheduler().matched(&id("d"), &unsaid, 18, 0).unwrap().tokens, 18);
    unsaid.remote_num_tokens = Some(20);
    assert_eq!(scheduler().matched(&id("d"), &unsaid, 18, 0).unwrap().tokens, 18, "it may hold more");
}

#[test]
fn more_block_ids_than_a_prompt_can_have_are_refused() {
    let many = MAX_BLOCK_IDS + 1;
    for (lists_of_ids, tokens, words) in [
        (vec![vec![0; many - 1], vec![]], 18, "remote_block_ids[0]: 4194304 block ids for 18 tokens"),
        (vec![vec![0; many], vec![]], 18, "remote_block_ids: 4194305 block ids, at most 4194304 can be"),
        (vec![vec![11; 18], vec![0; 19]], 18, "remote_block_ids[1]: 19 block ids for 18 tokens"),
        (vec![vec![0; many], vec![23]], i64::MAX, "remote_block_ids: 4194306 block ids, at most 4194304 can be"),
        (vec![vec![0; many / 2 + 1]; 2], 1 << 40, "remote_block_ids: 4194306 block ids, at most 4194304 can be"),
    ] {
        let params =
            TransferParams { remote_block_ids: Some(lists_of_ids), remote_num_tokens: Some(tokens), ..offered() };
        let mut s = scheduler();
        let e = s.matched(&id("d"), &params, 18, 0).expect_err(words);
        assert!(e.message().contains(words), "{e}");
        let local = lists(&[1, 2, 3, 4, 5], &[6, 7, 8]);
        assert_eq!(s.allocated(&id("d"), &params, local, 18, 18).unwrap_err(), e);
        assert!(!s.has_pending() && s.receiving() == 0);
    }
    let e = scheduler().allocated(&id("d"), &offered(), vec![vec![1; many].into(), Blocks::default()], 18, 18);
    assert!(e.unwrap_err().message().contains("4194305 blocks are to be filled, at most 4194304 can be"));
}

#[test]
fn texts_from_outside_are_cut_in_errors() {
    type Change = fn(&mut TransferParams);
    let cases: [Change; 2] =
        [|p| p.transfer_mode = Some("\u{fffd}".repeat(1 << 20)), |p| p.remote_incarnation = Some("f".repeat(1 << 20))];
    for change in cases {
        let mut params = offered();
        change(&mut params);
        let e = scheduler().arrived(&id("d"), &params).unwrap_err();
        assert!(e.message().len() < 1000, "{} bytes", e.message().len());
    }
}

#[test]
fn settings_that_cannot_work_are_named() {
    type Change = fn(&mut SchedulerConfig);
    let cases: [(&str, Change); 6] = [
        ("tp_size", |c| c.tp_size = 0),
        ("lease_ms", |c| c.lease_ms = 999),
        ("incarnation", |c| c.incarnation = Incarnation(0)),
        ("groups", |c| c.groups.clear()),
        ("groups[0].block_size", |c| c.groups[0].block_size = 0),
        ("groups[1].kind", |c| c.groups[1].kind = GroupKind::SlidingWindow { window: 0 }),
    ];
    for (words, change) in cases {
        let mut c = config();
        change(&mut c);
        let e = Scheduler::new(c).unwrap_err();
        assert!(e.message().contains(words), "{e}");
    }
}

/// Every key of `kv_transfer_params`.
const KEYS: [&str; 15] = [
    "do_remote_prefill",
    "do_remote_decode",
    "transfer_id",
    "remote_engine_id",
    "remote_incarnation",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_lease_ms",
    "remote_lease_id",
    "tp_size",
    "pp_size",
    "dcp_size",
];

#[test]
fn a_key_that_is_null_is_a_key_that_is_missing() {
    let whole = TransferParams {
        transfer_id: Some("x-1".into()),
        tp_size: Some(1),
        pp_size: Some(1),
        dcp_size: Some(1),
        ..offered()
    };
    let serde_json::Value::Object(whole) = serde_json::to_value(&whole).unwrap() else { panic!("a map") };
    let keys: Vec<&str> = KEYS.into_iter().chain(["transfer_mode"]).collect();
    assert_eq!(whole.len(), keys.len(), "every key is tried");
    let parse = |map: &serde_json::Map<String, serde_json::Value>| {
        let packed = rmp_serde::to_vec_named(map).unwrap();
        let params: Result<TransferParams, _> = rmp_serde::from_slice(&packed);
        params.unwrap_or_else(|e| panic!("{map:?}: {e}"))
    };
    let mut all = whole.clone();
    for key in &keys {
        let (mut null, mut missing) = (whole.clone(), whole.clone());
        null.insert((*key).to_owned(), serde_json::Value::Null);
        missing.remove(*key);
        assert_eq!(parse(&null), parse(&missing), "{key}");
        all.insert((*key).to_owned(), serde_json::Value::Null);
    }
    assert_eq!(parse(&all), TransferParams::default());
    all.insert("do_remote_decode".into(), true.into());
    assert_eq!(parse(&all), asked());
}
