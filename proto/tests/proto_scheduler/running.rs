//! Prefills that are told of while they are under way.

use super::*;

fn notices(s: &mut SchedulerMachine) -> Vec<PrefillNotice> {
    std::iter::from_fn(|| s.poll_notice()).collect()
}

/// The one prefill that is told of: its tokens, the blocks of its first group, and its lease.
fn progress(s: &mut SchedulerMachine) -> (u64, Vec<u32>, u64) {
    let mut told = notices(s);
    let Some(PrefillNotice::Written(prefill)) = told.pop() else { panic!("nothing is told") };
    assert!(told.is_empty());
    assert_eq!((prefill.request, prefill.lease_ms, prefill.blocks[1].len()), (id("x-1"), 30_000, 0));
    (prefill.tokens, prefill.blocks[0].ids().to_vec(), prefill.lease_id)
}

fn tell(s: &mut SchedulerMachine, request: &str, full: &[u32], tokens: u64) {
    s.progressed(&id(request), &id("x-1"), &lists(full, &[1; 5]), tokens).unwrap();
}

fn finish(
    s: &mut SchedulerMachine,
    request: &str,
    asked: &TransferParams,
    outcome: FinishOutcome,
) -> Option<TransferParams> {
    let blocks = lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    s.finished(&id(request), asked, outcome, blocks, 18).unwrap().params
}

#[test]
fn the_lease_that_is_promised_is_granted() {
    let mut s = scheduler();
    s.set_lease_entropy(500);
    tell(&mut s, "p-1", &[11, 12, 13], 8);
    assert_eq!(progress(&mut s), (8, vec![11, 12], 501), "blocks behind what is written hold nothing");
    s.set_lease_entropy(900);
    tell(&mut s, "p-1", &[11, 12, 13, 14], 13);
    assert_eq!(progress(&mut s), (13, vec![11, 12, 13, 14], 501));
    assert!(!s.has_pending(), "workers have nothing to do for it");
    let params = finish(&mut s, "p-1", &named("x-1"), FinishOutcome::Complete).unwrap();
    assert_eq!(params.remote_lease_id, Some(501));
    assert_eq!(take_step(&mut s).grants[0].lease_id, 501);
    // What was written last is known when the request has ended; whose blocks these are the machine knows itself.
    tell(&mut s, "p-1", &[], 16);
    assert_eq!(progress(&mut s), (16, vec![11, 12, 13, 14], 501));
    tell(&mut s, "p-1", &[], 18);
    assert_eq!(progress(&mut s), (18, vec![11, 12, 13, 14, 15], 501));
    s.on_report(&granted(&["p-1"])).unwrap();
    let told = notices(&mut s);
    assert!(
        matches!(&told[..], [PrefillNotice::Ready(prefill)] if prefill.lease_id == 501 && prefill.blocks[1].len() == 3)
    );
    tell(&mut s, "p-1", &[], 18);
    assert_eq!(notices(&mut s), [], "all is told");
}

#[test]
fn blocks_that_are_given_away_take_the_lease_with_them() {
    let mut s = scheduler();
    tell(&mut s, "p-1", &[11, 12], 8);
    let (.., first) = progress(&mut s);
    s.progressed(&id("p-1"), &id("x-1"), &[], 0).unwrap();
    assert_eq!(notices(&mut s), [PrefillNotice::Retracted(id("x-1"))]);
    s.progressed(&id("p-1"), &id("x-1"), &[], 0).unwrap();
    assert_eq!(notices(&mut s), []);
    tell(&mut s, "p-1", &[31], 4);
    let (tokens, ids, second) = progress(&mut s);
    assert_eq!((tokens, ids, second != first), (4, vec![31], true));
    s.progressed(&id("p-1"), &id("x-1"), &[], 0).unwrap();
    let params = finish(&mut s, "p-1", &named("x-1"), FinishOutcome::Complete).unwrap();
    let third = params.remote_lease_id.unwrap() as u64;
    assert!(third != first && third != second, "neither was kept");
}

#[test]
fn other_blocks_and_fewer_tokens_are_another_lease_also_where_the_host_says_nothing() {
    let finish = |s: &mut SchedulerMachine| {
        let params = finish(s, "p-1", &named("x-1"), FinishOutcome::Complete).unwrap();
        params.remote_lease_id.unwrap() as u64
    };
    for (full, tokens, same) in [
        (&[11, 12, 13][..], 10, true),
        (&[11, 12][..], 7, false),
        (&[11, 32, 13][..], 12, false),
        (&[12, 11, 13][..], 12, false),
    ] {
        let mut s = scheduler();
        tell(&mut s, "p-1", &[11, 12], 8);
        let (.., first) = progress(&mut s);
        tell(&mut s, "p-1", full, tokens);
        let (.., second) = progress(&mut s);
        assert_eq!(first == second, same, "{full:?}");
        assert_eq!(finish(&mut s) == second, full.starts_with(&[11, 12]), "it ends with 11, 12, 13, 14, 15");
    }
}

#[test]
fn of_a_prefill_that_ends_in_another_way_nothing_is_left() {
    for (asked, outcome) in [
        (named("x-1"), FinishOutcome::Aborted),
        // Under another name, or under none.
        (named("x-2"), FinishOutcome::Complete),
        (asked(), FinishOutcome::Complete),
    ] {
        let mut s = scheduler();
        tell(&mut s, "p-1", &[11, 12], 8);
        let (.., promised) = progress(&mut s);
        let params = finish(&mut s, "p-1", &asked, outcome);
        assert_ne!(params.and_then(|p| p.remote_lease_id), Some(promised as i64));
        assert!(notices(&mut s).contains(&PrefillNotice::Retracted(id("x-1"))), "{asked:?}");
    }
    // New workers know of no lease.
    let mut s = scheduler();
    tell(&mut s, "p-1", &[11, 12], 8);
    let (.., promised) = progress(&mut s);
    s.renew_engine(Incarnation(0xD), vec![]);
    assert_eq!(notices(&mut s), [PrefillNotice::Retracted(id("x-1"))]);
    let params = finish(&mut s, "p-1", &named("x-1"), FinishOutcome::Complete).unwrap();
    assert_ne!(params.remote_lease_id, Some(promised as i64));
}

#[test]
fn of_several_requests_with_one_name_the_first_counts() {
    let mut s = scheduler();
    tell(&mut s, "p-1", &[11, 12], 8);
    let (.., promised) = progress(&mut s);
    tell(&mut s, "p-2", &[21, 22], 8);
    assert_eq!(notices(&mut s), []);
    let params = finish(&mut s, "p-1", &named("x-1"), FinishOutcome::Complete).unwrap();
    assert_eq!(params.remote_lease_id, Some(promised as i64));
    // While one is kept under it, too.
    tell(&mut s, "p-2", &[21, 22], 8);
    assert_eq!(notices(&mut s), []);
}

#[test]
fn what_cannot_hold_so_many_tokens_is_refused() {
    let mut s = scheduler();
    let one_list = [Blocks::from([1].as_slice())];
    for (blocks, parts) in [
        (&one_list[..], ["one list of blocks for each of the 2 KV-cache groups", "got 1"]),
        (&lists(&[11, 12], &[]), ["9 tokens are said to be written, which 3 blocks hold", "2 were given"]),
    ] {
        let error = s.progressed(&id("p-1"), &id("x-1"), blocks, 9).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(parts.iter().all(|part| error.message().contains(part)), "{error}");
    }
    assert_eq!(notices(&mut s), []);
}
