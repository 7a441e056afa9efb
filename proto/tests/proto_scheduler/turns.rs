//! Conversations that go on: what a decode engine keeps, and what a prefill engine loads of it.

use kvferry_proto::scheduler::MultiTurn;

use super::*;

fn multi_turn() -> SchedulerMachineConfig {
    let multi_turn = Some(MultiTurn { lease_ms: 480_000, least_tokens: 8, most_blocks: 10 });
    SchedulerMachineConfig { multi_turn, ..config() }
}

fn engine() -> SchedulerMachine {
    let mut s = SchedulerMachine::new(multi_turn()).unwrap();
    s.set_address("10.1.2.3", 5680);
    s
}

/// What a decode engine answers that has 18 tokens: 5 blocks, of which the window's are 2 or 3.
fn history() -> TransferParams {
    TransferParams { do_remote_prefill: false, do_remote_decode: true, ..offered() }
}

fn whole() -> Vec<Blocks> {
    lists(&[11, 12, 13, 14, 15], &[0, 0, 0, 24, 25])
}

/// A request that was loaded and decoded.
fn decoded(s: &mut SchedulerMachine, name: &str, blocks: Vec<Blocks>, tokens: u64) -> Option<TransferParams> {
    s.allocated(&id(name), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    s.on_report(&over(&[name], &[])).unwrap();
    let finish = s.finished(&id(name), &offered(), FinishOutcome::Complete, blocks, tokens).unwrap();
    assert_eq!(finish.keep, finish.params.is_some());
    finish.params
}

#[test]
fn a_decoded_request_is_kept_for_the_next_turn() {
    let mut s = engine();
    let params = decoded(&mut s, "d", whole(), 18).unwrap();
    assert_eq!((params.do_remote_prefill, params.do_remote_decode), (false, true));
    assert_eq!(params.remote_block_ids, Some(vec![vec![11, 12, 13, 14, 15], vec![24, 25]]));
    assert_eq!((params.remote_num_tokens, params.remote_lease_ms), (Some(18), Some(480_000)));
    assert_eq!(params.remote_request_id.as_deref(), Some("d"));
    let step = take_step(&mut s);
    assert_eq!((step.grants[0].request.as_str(), step.grants[0].lease_ms), ("d", 480_000));
    assert_eq!((step.releases.len(), step.dropped.len(), s.sending(), s.receiving()), (0, 0, 1, 0));
    s.on_report(&over(&[], &["d"])).unwrap();
    assert_eq!(s.sending(), 0);
}

#[test]
fn what_no_turn_can_go_on_from_is_not_kept() {
    let cases = [
        ("a block of the window is gone", lists(&[11, 12, 13, 14, 15], &[0, 0, 0, 0, 25]), 18),
        ("a block is missing", lists(&[11, 12, 13, 14], &[0, 0, 23, 24, 25]), 18),
        ("a block is null", lists(&[11, 12, 0, 14, 15], &[0, 0, 23, 24, 25]), 18),
        ("vLLM has taken the blocks", lists(&[], &[]), 18),
        ("nothing was computed", lists(&[], &[]), 0),
    ];
    for (why, blocks, tokens) in cases {
        let mut s = engine();
        assert_eq!(decoded(&mut s, "d", blocks, tokens), None, "{why}");
        assert_eq!((s.sending(), take_step(&mut s).grants.len()), (0, 0), "{why}");
    }
    let mut s = SchedulerMachine::new(SchedulerMachineConfig { multi_turn: None, ..multi_turn() }).unwrap();
    assert_eq!(decoded(&mut s, "d", whole(), 18), None, "nobody asked for it");
    let groups = vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::State, 1)];
    let mut s = SchedulerMachine::new(SchedulerMachineConfig { groups, ..multi_turn() }).unwrap();
    s.set_address("10.1.2.3", 5680);
    let finish = s.finished(&id("d"), &offered(), FinishOutcome::Complete, whole(), 18).unwrap();
    assert!(!finish.keep, "a state may have gone on");
    let mut s = engine();
    let shared = TransferParams { shared: Some(true), ..offered() };
    assert!(
        !s.finished(&id("d"), &shared, FinishOutcome::Complete, whole(), 18).unwrap().keep,
        "one sample of several"
    );
    assert!(!s.finished(&id("e"), &offered(), FinishOutcome::Aborted, whole(), 18).unwrap().keep);
}

#[test]
fn the_oldest_conversations_give_way() {
    let mut s = engine();
    // Of ten blocks two each, and then seven.
    for name in ["a", "b", "c"] {
        assert!(decoded(&mut s, name, lists(&[31], &[41]), 3).is_some(), "{name}");
    }
    assert_eq!(take_step(&mut s).dropped, []);
    s.on_report(&over(&[], &["b"])).unwrap();
    assert!(decoded(&mut s, "d", whole(), 18).is_some());
    let step = take_step(&mut s);
    assert_eq!((step.grants[0].request.as_str(), step.dropped), ("d", vec![id("a")]), "c is left");
    assert_eq!((s.sending(), s.forget_histories(0)), (3, 1), "until the workers have released a");
    s.on_report(&over(&[], &["a"])).unwrap();
    assert!(decoded(&mut s, "a", whole(), 18).is_some());
    assert_eq!(take_step(&mut s).dropped, vec![id("c"), id("d")]);
    // More than all that may be kept.
    let more: Vec<u32> = (1..=10).collect();
    assert_eq!(decoded(&mut s, "e", lists(&more, &[0, 0, 0, 0, 0, 0, 0, 0, 41, 42]), 40), None);
    assert_eq!((s.sending(), take_step(&mut s).dropped), (3, vec![]));
}

#[test]
fn a_prefill_loads_what_a_decode_engine_has_and_is_handed_over_in_its_turn() {
    let mut s = engine();
    s.arrived(&id("p"), &history()).unwrap();
    assert_eq!(take_step(&mut s).holds[0].remote.request.as_str(), "p-1");
    assert_eq!(s.matched(&id("p"), &history(), 16, 4).unwrap(), PrefixMatch { tokens: 12, asynchronous: true });
    assert_eq!(s.matched(&id("p"), &history(), 16, 9).unwrap(), PrefixMatch::default(), "seven are computed here");
    s.allocated(&id("p"), &history(), lists(&[1, 2, 3], &[5, 6, 7]), 16, 12).unwrap();
    let load = &take_step(&mut s).loads[0];
    assert_eq!((load.tokens, load.remote_tokens, load.refused.as_ref()), ((4, 16), 18, None));
    assert_eq!(load.remote_blocks, lists(&[11, 12, 13, 14, 15], &[23, 24, 25]));
    s.on_report(&over(&["p"], &[])).unwrap();
    let params = s.finished(&id("p"), &history(), FinishOutcome::Complete, whole(), 18).unwrap().params.unwrap();
    assert_eq!((params.do_remote_prefill, params.remote_request_id.as_deref()), (true, Some("p")));
    let step = take_step(&mut s);
    assert_eq!((step.grants.len(), step.releases.len(), s.receiving(), s.sending()), (1, 0, 0, 1));
}

#[test]
fn a_history_that_is_not_loaded_is_given_back() {
    for (allocated, outcome) in
        [(true, FinishOutcome::Complete), (false, FinishOutcome::Complete), (false, FinishOutcome::Aborted)]
    {
        let mut s = engine();
        s.arrived(&id("p"), &history()).unwrap();
        let _ = take_step(&mut s);
        if allocated {
            s.allocated(&id("p"), &history(), vec![], 0, 0).unwrap();
        }
        let complete = outcome == FinishOutcome::Complete;
        assert_eq!(s.finished(&id("p"), &history(), outcome, whole(), 18).unwrap().keep, complete);
        let step = take_step(&mut s);
        assert_eq!((step.releases.len(), step.grants.len()), (1, usize::from(complete)));
    }
    // Of which nothing was said before it ended.
    let mut s = engine();
    s.finished(&id("p"), &history(), FinishOutcome::Aborted, vec![], 0).unwrap();
    assert_eq!(take_step(&mut s).releases.len(), 1);
}

/// Those that await it must not wait any longer, however it ends.
#[test]
fn a_prefill_that_ends_under_the_load_of_its_history_is_handed_over_to_nobody() {
    for (outcome, transfer_id) in
        [(FinishOutcome::Aborted, None), (FinishOutcome::Aborted, Some("x")), (FinishOutcome::Complete, Some("x"))]
    {
        let mut s = engine();
        let asked = TransferParams { transfer_id: transfer_id.map(str::to_owned), ..history() };
        s.allocated(&id("q"), &asked, lists(&[1, 2, 3], &[5, 6, 7]), 16, 12).unwrap();
        for _ in 0..2 {
            let finish = s.finished(&id("q"), &asked, outcome, whole(), 18).unwrap();
            assert_eq!((finish.keep, finish.params), (true, None));
        }
        assert_eq!(s.poll_notice(), transfer_id.map(|name| PrefillNotice::Gone(id(name))));
        assert_eq!(s.poll_notice(), None);
        let step = take_step(&mut s);
        assert_eq!((step.aborts, step.dropped), (vec![id("q")], vec![id(transfer_id.unwrap_or("q"))]));
        assert_eq!(s.stats().drops, 1);
        s.on_report(&over(&["q"], &[])).unwrap();
        assert_eq!((s.receiving(), s.sending()), (0, 0));
    }
}

#[test]
fn the_host_can_have_conversations_let_go_of() {
    let mut s = engine();
    for name in ["a", "b", "c"] {
        assert!(decoded(&mut s, name, lists(&[31], &[41]), 3).is_some());
    }
    assert!(take_step(&mut s).grants.iter().all(|grant| grant.history));
    assert_eq!((s.forget_histories(1), take_step(&mut s).dropped), (1, vec![id("a")]));
    assert_eq!((s.forget_histories(0), s.has_pending(), s.sending()), (1, false, 3));
    assert_eq!((s.forget_histories(usize::MAX), take_step(&mut s).dropped), (3, vec![id("b"), id("c")]));
    assert_eq!((s.forget_histories(5), s.has_pending(), s.sending()), (3, false, 3));
    s.on_report(&over(&[], &["b"])).unwrap();
    assert_eq!((s.forget_histories(0), s.sending()), (2, 2));
    s.on_report(&over(&[], &["a", "c"])).unwrap();
    assert_eq!((s.forget_histories(1), s.has_pending(), s.sending()), (0, false, 0));
}

#[test]
fn params_of_a_history_that_cannot_be_used_are_named() {
    let s = engine();
    let without_tokens = TransferParams { remote_num_tokens: None, ..history() };
    let error = s.matched(&id("p"), &without_tokens, 16, 0).unwrap_err();
    assert!(error.message().contains("remote_num_tokens is missing"), "{error}");
    let error = s.matched(&id("p"), &history(), 19, 0).unwrap_err();
    assert!(error.message().contains("holds 18 tokens, the prompt has 19"), "{error}");
    let without_port = TransferParams { remote_port: None, ..history() };
    assert!(s.matched(&id("p"), &without_port, 16, 0).unwrap_err().message().contains("remote_port"));
    // Every key of a first turn is null.
    let first = TransferParams { remote_block_ids: None, remote_num_tokens: None, ..history() };
    assert_eq!(s.matched(&id("p"), &first, 16, 0).unwrap(), PrefixMatch::default());
    // And without multi_turn nothing of it is looked at.
    let mut plain = scheduler();
    plain.arrived(&id("p"), &without_port).unwrap();
    assert_eq!(plain.matched(&id("p"), &without_port, 16, 0).unwrap(), PrefixMatch::default());
    assert!(!plain.has_pending());
    let config = SchedulerMachineConfig {
        multi_turn: Some(MultiTurn { lease_ms: 5, least_tokens: 0, most_blocks: 0 }),
        ..config()
    };
    assert!(SchedulerMachine::new(config).unwrap_err().message().contains("multi_turn.lease_ms"));
}
