//! A consumer rank that reads from many ranks of a producer.

use super::*;

/// A machine that holds all heads, and producer ranks that hold one each.
const MANY: u32 = 12;
/// How many of them are connected to at a time.
const AT_A_TIME: usize = 8;

fn many_heads() -> WorkerMachine {
    let mut local = metadata(engine("me"), 77, 8 * u64::from(MANY));
    for area in &mut local.geometry.areas {
        (area.heads, area.total_heads) = (MANY, MANY);
    }
    let mut w = WorkerMachine::new(config()).unwrap();
    w.set_local(Arc::new(local));
    w
}

fn many_ranks() -> Vec<RankMetadata> {
    let shape = EngineShape { tp: MANY, ..SHAPE };
    let rank = |tp: u32| {
        let mut remote = metadata(engine("p"), 1_000 + u64::from(tp), 8);
        (remote.rank.tp, remote.shape) = (tp, shape);
        for area in &mut remote.geometry.areas {
            (area.first_head, area.total_heads) = (tp, MANY);
        }
        remote
    };
    (0..MANY).map(rank).collect()
}

/// A load with many ranks; gives those that are being connected to.
fn connect_all(w: &mut WorkerMachine) -> Vec<PeerKey> {
    loads(w, 10, load("a", [&[3], &[4]]));
    let session = handshake(w);
    answer(w, 20, session, 9, &many_ranks());
    let first = does(w);
    assert_eq!((first.connects.len(), first.transfers.len(), first.beats.len()), (AT_A_TIME, 0, 0));
    first.connects
}

#[test]
fn each_rank_is_read_from_as_soon_as_it_is_connected_and_confirmed_with_all() {
    let mut w = many_heads();
    let mut connecting: std::collections::VecDeque<PeerKey> = connect_all(&mut w).into();
    let (mut tokens, mut peers) = (Vec::new(), Vec::new());
    while let Some(peer) = connecting.pop_front() {
        w.handle_connected(Time(30), &peer);
        let done = does(&mut w);
        assert_eq!(done.beats, [PeerRef::Outbound(peer.clone())], "kept alive from now on, once");
        let [(token, read)] = &done.transfers[..] else { panic!("one read") };
        assert_eq!(*read, peer);
        // The first ranks are read before the last ones are even connected to.
        w.handle_transfer_done(Time(70), *token, Ok(figures()));
        tokens.push(*token);
        peers.push(peer.clone());
        // Connected twice is connected once.
        w.handle_connected(Time(31), &peer);
        connecting.extend(done.connects);
        let confirmed = does(&mut w);
        assert!(confirmed.transfers.is_empty() && confirmed.beats.is_empty());
        let last = peers.len() == MANY as usize;
        assert_eq!(confirmed.dones.len(), if last { MANY as usize } else { 0 });
        for ((to, serial), rank) in confirmed.dones.into_iter().zip(&peers) {
            assert_eq!(to, PeerRef::Outbound(rank.clone()));
            assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
            let verdict = PeerMessage::Verdict { request: request("p-a"), verdict: Verdict::Valid, serial };
            w.handle_message(Time(100), &to, verdict);
        }
    }
    assert_eq!(peers.len(), MANY as usize);
    let report = w.poll_report().unwrap();
    assert_eq!((report.finished_recving, report.failed_recving), (vec![request("a")], vec![]));
    assert_eq!(report.records[0].bytes, 8 * u64::from(MANY));
}

#[test]
fn a_load_that_comes_while_ranks_are_connected_reads_from_those_that_are() {
    let mut w = many_heads();
    let connecting = connect_all(&mut w);
    for peer in &connecting[..3] {
        w.handle_connected(Time(30), peer);
    }
    let _ = does(&mut w);
    // A hold, which is then a load, and a load at once.
    w.handle_step(
        Time(40),
        StepMetadata {
            holds: vec![Hold { request: request("b"), remote: load("b", [&[5], &[6]]).remote }],
            ..Default::default()
        },
    );
    let held = does(&mut w);
    assert_eq!((held.beats.len(), held.transfers.len()), (3, 0));
    loads(&mut w, 41, load("b", [&[5], &[6]]));
    let loaded = does(&mut w);
    assert_eq!((loaded.beats.len(), loaded.transfers.len()), (0, 3));
    loads(&mut w, 42, load("c", [&[7], &[8]]));
    let third = does(&mut w);
    assert_eq!((third.beats.len(), third.transfers.len()), (3, 3));
    w.handle_connected(Time(43), &connecting[3]);
    let next = does(&mut w);
    assert_eq!((next.beats.len(), next.transfers.len()), (3, 3));
    assert!(next.transfers.iter().all(|(_, peer)| *peer == connecting[3]));
}

#[test]
fn an_abort_while_ranks_are_connected_waits_for_its_reads_and_tells_all_ranks_when_they_are() {
    let mut w = many_heads();
    let mut connecting: std::collections::VecDeque<PeerKey> = connect_all(&mut w).into();
    let first = connecting.pop_front().unwrap();
    w.handle_connected(Time(30), &first);
    let begun = does(&mut w);
    connecting.extend(begun.connects);
    let token = begun.transfers[0].0;
    w.handle_step(Time(40), StepMetadata { aborts: vec![request("a")], ..Default::default() });
    assert_eq!(does(&mut w).cancels, [token]);
    assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
    // Ranks that come now are of no use to it.
    let second = connecting.pop_front().unwrap();
    w.handle_connected(Time(41), &second);
    let done = does(&mut w);
    assert!(done.transfers.is_empty() && done.beats.is_empty());
    connecting.extend(done.connects);
    w.handle_transfer_done(Time(50), token, Err((Cause::Aborted, "cancelled".into())));
    assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::Aborted)]);
    while let Some(peer) = connecting.pop_front() {
        w.handle_connected(Time(60), &peer);
        let done = does(&mut w);
        assert!(done.transfers.is_empty() && done.beats.is_empty());
        connecting.extend(done.connects);
        assert_eq!(done.releases.len(), if connecting.is_empty() { MANY as usize } else { 0 });
    }
}

#[test]
fn a_load_given_up_while_ranks_are_connected_leaves_the_lease_to_another_one_of_the_same_request() {
    let mut w = many_heads();
    let mut connecting: std::collections::VecDeque<PeerKey> = connect_all(&mut w).into();
    loads(&mut w, 11, Load { request: request("b"), ..load("a", [&[5], &[4]]) });
    let first = connecting.pop_front().unwrap();
    w.handle_connected(Time(30), &first);
    let begun = does(&mut w);
    assert_eq!((begun.beats.len(), begun.transfers.len()), (1, 2));
    connecting.extend(begun.connects);
    w.handle_step(Time(40), StepMetadata { aborts: vec![request("a")], ..Default::default() });
    let cancelled = does(&mut w).cancels;
    let mut beats = 1;
    // The next rank is connected while what was cancelled is under way, the others when it has ended.
    for (index, now) in (41..).enumerate() {
        let Some(peer) = connecting.pop_front() else { break };
        w.handle_connected(Time(now), &peer);
        let done = does(&mut w);
        assert!(done.releases.is_empty());
        beats += done.beats.len();
        connecting.extend(done.connects);
        for token in cancelled.iter().filter(|_| index == 0) {
            w.handle_transfer_done(Time(now), *token, Err((Cause::Aborted, "cancelled".into())));
        }
    }
    assert_eq!(beats, MANY as usize);
    // And goes on, on every rank.
    let due = w.poll_timeout().unwrap();
    w.handle_timeout(Time(due.0 + 30));
    assert_eq!(does(&mut w).beats.len(), MANY as usize);
}

#[test]
fn a_rank_that_cannot_be_reached_fails_the_load_after_its_reads_from_the_others() {
    let mut w = many_heads();
    let connecting = connect_all(&mut w);
    w.handle_connected(Time(30), &connecting[0]);
    let begun = does(&mut w);
    let token = begun.transfers[0].0;
    w.handle_peer_lost(Time(40), &PeerRef::Outbound(connecting[1].clone()), "no route");
    assert_eq!(does(&mut w).cancels, [token]);
    assert!(w.poll_report().is_none_or(|r| r.finished_recving.is_empty()));
    w.handle_transfer_done(Time(50), token, Ok(figures()));
    assert_eq!(failed(w.poll_report()), [("a".to_string(), Cause::PeerDied)]);
    let done = does(&mut w);
    assert_eq!(done.releases, [PeerRef::Outbound(connecting[0].clone())]);
    // Only what was begun is undone: eight, and the ninth that came when the first was connected, without the lost one.
    assert_eq!((begun.connects.len(), done.disconnects.len()), (1, AT_A_TIME));
    assert!(w.is_drained() && w.gauges().peers == 0);
}

#[test]
fn a_load_that_starts_anew_reads_chunks_from_all_ranks_again() {
    let mut w = WorkerMachine::new(with(WorkerSettings { chunk_tokens: 1, ..settings() })).unwrap();
    let mut local = metadata(engine("me"), 77, 8 * u64::from(MANY));
    for area in &mut local.geometry.areas {
        (area.heads, area.total_heads) = (MANY, MANY);
    }
    w.set_local(Arc::new(local));
    let mut wanted = load("a", [&[3, 4], &[0, 0]]);
    (wanted.awaits, wanted.remote_tokens, wanted.remote_blocks) = (true, 0, vec![Blocks::default(); 2]);
    loads(&mut w, 10, wanted);
    let (mut session, mut number) = (None, None);
    for action in actions(&mut w) {
        match action {
            Action::Handshake { session: to, .. } => session = Some(to),
            Action::Await { number: of, .. } => number = Some(of),
            other => panic!("not expected: {other:?}"),
        }
    }
    answer(&mut w, 20, session.unwrap(), 9, &many_ranks());
    let mut connected = 0;
    while let Some(peer) = actions(&mut w).into_iter().find_map(|action| match action {
        Action::Connect { peer, .. } => Some(peer),
        _ => None,
    }) {
        w.handle_connected(Time(30), &peer);
        connected += 1;
    }
    assert!(connected > 1);
    let told = |w: &mut WorkerMachine, lease_id: u64| {
        let (request, blocks) = (request("p-a"), vec![Blocks::from(vec![7]), Blocks::default()]);
        let prefill = Prefill { request, blocks, tokens: u64::from(BLOCK_TOKENS), lease_ms: 1_200, lease_id };
        let progress = PrefillProgress { incarnation: Incarnation(9), prefill, over: false };
        w.handle_prefill(Time(40), number.unwrap(), Ok(progress));
        actions(w)
    };
    let posted = |actions: &[Action]| -> Vec<TransferToken> {
        let token = |action: &Action| match action {
            Action::Transfer { token, .. } => Some(*token),
            _ => None,
        };
        actions.iter().filter_map(token).collect()
    };
    let first = posted(&told(&mut w, 5));
    assert_eq!(first.len(), connected);
    assert_eq!(posted(&told(&mut w, 6)), [], "not beside reads of what was given away");
    let mut again = Vec::new();
    for token in first {
        assert_eq!(again, []);
        w.handle_transfer_done(Time(50), token, Err((Cause::Aborted, "cancelled".into())));
        again = posted(&actions(&mut w));
    }
    assert_eq!(again.len(), connected);
}
