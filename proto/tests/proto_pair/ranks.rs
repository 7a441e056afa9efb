//! Engines of several ranks and unequal shapes, whose requests share one prefill. Each rank takes its steps, messages and
//! completions at its own pace, in an order that the test draws; what comes over one connection stays in order.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use kvferry_proto::ids::{Incarnation, RankId};
use kvferry_proto::plan::Holding;
use kvferry_proto::time::Time;
use kvferry_proto::wire::{
    Blocks, Cause, EngineShape, Grant, Hold, Load, PeerMessage, RankMetadata, Release, Remote, StepMetadata,
};
use kvferry_proto::worker::{Action, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, WorkerMachine};
use proptest::prelude::*;

use crate::rank::*;
use crate::sim::{ms, worker_config};

const HEADS: u32 = 4;
const LEASE: u64 = 41;

enum Event {
    Step(StepMetadata),
    Handshake(SessionId),
    Connected(PeerKey),
    Transfer(TransferToken),
    Message(PeerRef, PeerMessage),
}

/// Whose events they are: of P's ranks or of D's, which rank's, and over which connection or for which transfer.
type Queue = (bool, usize, u64);

struct Ranks {
    now: Time,
    p: Vec<WorkerMachine>,
    d: Vec<WorkerMachine>,
    /// The producer's ranks, as its listener tells them.
    theirs: Vec<RankMetadata>,
    queues: BTreeMap<Queue, VecDeque<Event>>,
    /// By D's rank and connection, P's rank.
    links: HashMap<(usize, u64), usize>,
    /// Terminal reports by D's rank and request.
    received: BTreeMap<(usize, String), Option<Cause>>,
    /// How often each of P's ranks said that it has sent.
    sent: Vec<usize>,
    expired: u64,
}

fn metadata_of(name: &str, agents: u64, tp: u32) -> Vec<RankMetadata> {
    let heads = HEADS / tp;
    let rank = |rank: u32| {
        let mut metadata = metadata(engine(name), agents + u64::from(rank), BLOCK_BYTES as u64 * u64::from(heads));
        (metadata.rank, metadata.shape) = (RankId { pp: 0, tp: rank }, EngineShape { tp, ..SHAPE });
        for area in &mut metadata.geometry.areas {
            (area.heads, area.first_head, area.total_heads) = (heads, heads * rank, HEADS);
        }
        metadata
    };
    (0..tp).map(rank).collect()
}

fn worker(metadata: &RankMetadata) -> WorkerMachine {
    let mut config = worker_config(metadata.engine.as_str(), metadata.agent.incarnation.0);
    (config.rank, config.shape) = (metadata.rank, metadata.shape);
    let mut worker = WorkerMachine::new(config).unwrap();
    worker.set_local(Arc::new(metadata.clone()));
    worker
}

fn remote(shared: bool) -> Remote {
    Remote {
        engine: engine("p"),
        incarnation: Some(Incarnation(9)),
        request: request("p-0"),
        host: "10.0.0.1".into(),
        port: 5680,
        lease_ms: 1_000,
        lease_id: LEASE,
        shared,
    }
}

fn hold(name: &str, shared: bool) -> StepMetadata {
    let hold = Hold { request: request(name), remote: remote(shared) };
    StepMetadata { holds: vec![hold], ..Default::default() }
}

fn load(name: &str, shared: bool, block: u32) -> StepMetadata {
    let lists = |first: u32| vec![Blocks::from(vec![first, first + 1]); 2];
    let load = Load {
        request: request(name),
        remote: remote(shared),
        local_blocks: lists(block),
        remote_blocks: lists(7),
        tokens: (0, 2 * u64::from(BLOCK_TOKENS)),
        remote_tokens: 2 * u64::from(BLOCK_TOKENS),
        awaits: false,
        null_block: Some(0),
        window_only: true,
        refused: None,
    };
    StepMetadata { loads: vec![load], ..Default::default() }
}

impl Ranks {
    fn new(p_tp: u32, d_tp: u32) -> Ranks {
        let (theirs, ours) = (metadata_of("p", 1_000, p_tp), metadata_of("d", 2_000, d_tp));
        let holdings: Vec<Holding> = ours.iter().map(|m| Holding::new(m.rank, &m.geometry)).collect();
        let mut ranks = Ranks {
            now: Time(1_000_000),
            p: theirs.iter().map(worker).collect(),
            d: ours.iter().map(worker).collect(),
            theirs,
            queues: BTreeMap::new(),
            links: HashMap::new(),
            received: BTreeMap::new(),
            sent: vec![0; p_tp as usize],
            expired: 0,
        };
        let grant = Grant { request: request("p-0"), lease_ms: 1_000, lease_id: LEASE, name: None, history: false };
        for p in 0..ranks.p.len() {
            let step = StepMetadata { grants: vec![grant.clone()], ..Default::default() };
            ranks.push((true, p, 0), Event::Step(step));
        }
        ranks.step(&StepMetadata { engine: holdings, ..Default::default() });
        ranks
    }

    fn push(&mut self, queue: Queue, event: Event) {
        self.queues.entry(queue).or_default().push_back(event);
    }

    /// A step of D's engine, which its ranks take when they come to it.
    fn step(&mut self, step: &StepMetadata) {
        for d in 0..self.d.len() {
            self.push((false, d, 0), Event::Step(step.clone()));
        }
    }

    /// One event happens, if one is left.
    fn turn(&mut self, choice: usize) -> bool {
        let at = choice.checked_rem(self.queues.len());
        let Some(queue) = at.and_then(|at| self.queues.keys().nth(at)).copied() else { return false };
        let events = self.queues.get_mut(&queue).unwrap();
        let event = events.pop_front().unwrap();
        if events.is_empty() {
            self.queues.remove(&queue);
        }
        self.now = self.now + ms(1);
        self.tick();
        let (of_p, rank, _) = queue;
        let worker = if of_p { &mut self.p[rank] } else { &mut self.d[rank] };
        match event {
            Event::Step(step) => worker.handle_step(self.now, step),
            Event::Handshake(session) => {
                worker.handle_handshake(self.now, session, Ok(reply(session, 9, &self.theirs)));
            }
            Event::Connected(peer) => worker.handle_connected(self.now, &peer),
            Event::Transfer(token) => worker.handle_transfer_done(self.now, token, Ok(TransferFigures::default())),
            Event::Message(from, message) => worker.handle_message(self.now, &from, message),
        }
        self.pump();
        true
    }

    fn tick(&mut self) {
        self.p.iter_mut().chain(&mut self.d).for_each(|worker| worker.handle_timeout(self.now));
        self.pump();
    }

    fn pump(&mut self) {
        for rank in 0..self.d.len() {
            while let Some(action) = self.d[rank].poll_action() {
                self.act(rank, action);
            }
            let Some(report) = self.d[rank].poll_report() else { continue };
            for id in &report.finished_recving {
                let cause = report.failed_recving.iter().find(|f| f.request == *id).map(|f| f.cause);
                let earlier = self.received.insert((rank, id.to_string()), cause);
                assert_eq!(earlier, None, "{id}: one terminal report of rank {rank}");
            }
        }
        for rank in 0..self.p.len() {
            while let Some(action) = self.p[rank].poll_action() {
                let Action::Send { peer: PeerRef::Inbound(number), message } = action else {
                    panic!("a producer only answers: {action:?}")
                };
                let (d, connection) = ((number >> 32) as usize, number & 0xFFFF_FFFF);
                let incarnation = self.theirs[rank].agent.incarnation;
                let key = PeerKey { connection, engine: engine("p"), incarnation, rank: self.theirs[rank].rank };
                self.push((false, d, connection), Event::Message(PeerRef::Outbound(key), message));
            }
            let Some(report) = self.p[rank].poll_report() else { continue };
            self.sent[rank] += report.finished_sending.len();
            self.expired += report.stats.sends_expired;
        }
    }

    fn act(&mut self, d: usize, action: Action) {
        match action {
            Action::Handshake { session, .. } => self.push((false, d, 1 << 40), Event::Handshake(session)),
            Action::Connect { peer, .. } => {
                let p = self.theirs.iter().position(|rank| rank.rank == peer.rank).unwrap();
                self.links.insert((d, peer.connection), p);
                self.push((false, d, peer.connection), Event::Connected(peer));
            }
            Action::Transfer { token, .. } => self.push((false, d, (2 << 40) + token.0), Event::Transfer(token)),
            Action::Send { peer: PeerRef::Outbound(key), message } => {
                let p = self.links[&(d, key.connection)];
                let from = PeerRef::Inbound(((d as u64) << 32) + key.connection);
                self.push((true, p, ((d as u64) << 32) + key.connection), Event::Message(from, message));
            }
            Action::Cancel { .. } | Action::Disconnect { .. } => {}
            other => panic!("not expected: {other:?}"),
        }
    }

    fn outcomes(&self, name: &str) -> Vec<Option<Option<Cause>>> {
        (0..self.d.len()).map(|rank| self.received.get(&(rank, name.to_owned())).copied()).collect()
    }

    /// Everything that is under way ends, and then time passes.
    fn settle(&mut self, choices: &mut impl Iterator<Item = usize>) {
        for _ in 0..400 {
            while self.turn(choices.next().unwrap_or(0)) {}
            self.now = self.now + ms(50);
            self.tick();
        }
        assert_eq!(self.sent, vec![1; self.p.len()], "each of P's ranks says once that it has sent");
        assert_eq!(self.expired, 0, "the last user of the lease gave it back");
        for worker in &self.d {
            let gauges = worker.gauges();
            assert_eq!((gauges.holds, gauges.loads, gauges.releases, gauges.transfers), (0, 0, 0, 0));
        }
    }
}

/// What becomes of one of the requests.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Load,
    /// Its client goes before it is allocated.
    AbortHeld,
    AbortLoading,
    /// All is cached.
    Release,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![4 => Just(Fate::Load), 1 => Just(Fate::AbortHeld), 1 => Just(Fate::AbortLoading), 1 => Just(Fate::Release)]
}

fn shape() -> impl Strategy<Value = u32> {
    prop_oneof![Just(1u32), Just(2), Just(4)]
}

fn abort(name: &str) -> StepMetadata {
    StepMetadata { aborts: vec![request(name)], ..Default::default() }
}

fn release(name: &str, shared: bool) -> StepMetadata {
    let release = Release { request: request(name), remote: remote(shared) };
    StepMetadata { releases: vec![release], ..Default::default() }
}

/// The steps that follow a request's hold.
fn steps(name: &str, fate: Fate, shared: bool, block: u32) -> Vec<StepMetadata> {
    match fate {
        Fate::Load => vec![load(name, shared, block)],
        Fate::AbortHeld => vec![abort(name)],
        Fate::AbortLoading => vec![load(name, shared, block), abort(name)],
        Fate::Release => vec![release(name, shared)],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(200), ..Default::default() })]

    #[test]
    fn requests_that_came_before_the_first_was_done_all_load(
        (p_tp, d_tp) in (shape(), shape()),
        fates in prop::collection::vec(fate(), 1..6),
        shared in any::<bool>(),
        choices in prop::collection::vec(any::<usize>(), 0..400),
    ) {
        let mut ranks = Ranks::new(p_tp, d_tp);
        let names: Vec<String> = (0..fates.len()).map(|k| format!("{k}_r")).collect();
        names.iter().for_each(|name| ranks.step(&hold(name, shared)));
        for (k, (name, fate)) in names.iter().zip(&fates).enumerate() {
            steps(name, *fate, shared, 10 + 4 * k as u32).iter().for_each(|step| ranks.step(step));
        }
        ranks.settle(&mut choices.into_iter());
        for (name, fate) in names.iter().zip(&fates) {
            let loaded = ranks.outcomes(name);
            match fate {
                Fate::Load => prop_assert!(loaded.iter().all(|o| *o == Some(None)), "{}: {:?}", name, loaded),
                Fate::AbortLoading => {
                    prop_assert!(loaded.iter().all(|o| [Some(None), Some(Some(Cause::Aborted))].contains(o)), "{:?}", loaded);
                }
                Fate::AbortHeld | Fate::Release => prop_assert!(loaded.iter().all(Option::is_none)),
            }
        }
    }

    #[test]
    fn requests_that_are_expected_load_one_after_another(
        (p_tp, d_tp) in (shape(), shape()),
        fates in prop::collection::vec(fate(), 2..6),
        choices in prop::collection::vec(any::<usize>(), 0..400),
    ) {
        let mut ranks = Ranks::new(p_tp, d_tp);
        let mut choices = choices.into_iter();
        for (k, fate) in fates.iter().enumerate() {
            let name = format!("{k}_r");
            ranks.step(&hold(&name, true));
            steps(&name, *fate, true, 10 + 4 * k as u32).iter().for_each(|step| ranks.step(step));
            // Everything about it is over before the next one is heard of.
            while ranks.turn(choices.next().unwrap_or(0)) {}
            if *fate == Fate::Load {
                let loaded = ranks.outcomes(&name);
                prop_assert!(loaded.iter().all(|o| *o == Some(None)), "{}: {:?}", name, loaded);
            }
        }
        prop_assert_eq!(&ranks.sent, &vec![0; p_tp as usize], "others might still follow");
        ranks.settle(&mut choices);
    }
}
