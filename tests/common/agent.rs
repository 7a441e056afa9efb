//! What the agent's tests share: plans with an independent model of what they copy, agents in this process and in children,
//! and waiting for events.

pub mod child;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvferry::agent::{Agent, AgentConfig, Direction, Event, PeerId, RegionId, TransferId, Transport};
use kvferry::proto::plan::{BlockPair, CopyPlan, Segment};
use kvferry::proto::wire::AgentMetadata;

use super::memory::{Buffer, difference};

/// Far above what any wait here needs on a busy machine; reaching it fails the test.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Set where the tests of RDMA run (scripts/rdma-test): the transports that UCX may use there, such as `rc`.
const RDMA: &str = "KVFERRY_TEST_RDMA";

/// The transport that reaches other hosts: TCP, or RDMA where its tests run.
pub fn wire() -> Transport {
    if std::env::var_os(RDMA).is_some() { Transport::Auto } else { Transport::Tcp }
}

/// The transport that moves memory without the peer's processor: CMA, or RDMA where its tests run.
pub fn direct() -> Transport {
    if wire() == Transport::Tcp { Transport::Shm } else { wire() }
}

/// The transports that every host has; where the tests of RDMA run, that.
pub fn transports() -> Vec<Transport> {
    match wire() {
        Transport::Tcp => vec![Transport::Tcp, Transport::Shm],
        rdma => vec![rdma],
    }
}

/// Over TCP everything is served by messages; over CMA and RDMA, an operation per run or gathered into messages.
pub fn ways() -> Vec<(Transport, u64)> {
    let gathered = |transport: &Transport| *transport != Transport::Tcp;
    let each = |transport| [0, u64::MAX].map(|gather_below| (transport, gather_below));
    transports().into_iter().flat_map(each).filter(|(transport, below)| gathered(transport) || *below == 0).collect()
}

/// A small generator of numbers, the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// `count` different block ids below `blocks`, in random order.
    pub fn blocks(&mut self, count: usize, blocks: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..blocks).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        all.truncate(count);
        all
    }
}

/// An agent with its memory and the events that came and were not asked for yet.
pub struct Node {
    pub agent: Agent,
    pub buffers: Vec<Buffer>,
    pub regions: Vec<RegionId>,
    pub events: VecDeque<Event>,
}

pub fn config(name: &str, transport: Transport) -> AgentConfig {
    // Peers may stand still for a while on a busy machine.
    let patient = LIMIT / 2;
    let mut config = AgentConfig {
        name: name.to_owned(),
        transport,
        connect_timeout: patient,
        cancel_grace: patient,
        ..AgentConfig::default()
    };
    if let (Transport::Auto, Ok(rdma)) = (transport, std::env::var(RDMA)) {
        config.ucx.insert("TLS".to_owned(), rdma);
    }
    config
}

/// Shows the library's log where KVFERRY_TEST_LOG is set: `cargo test ... -- --nocapture`.
fn show_log() {
    struct Log;
    impl log::Log for Log {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
            eprintln!("{:?} {} {}", START.get_or_init(Instant::now).elapsed(), record.level(), record.args());
        }
        fn flush(&self) {}
    }
    if std::env::var_os("KVFERRY_TEST_LOG").is_some() && log::set_logger(&Log).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
}

impl Node {
    /// An agent with a registered region per length, filled with the patterns `seed`, `seed + 1`, ...
    pub fn start(config: AgentConfig, seed: u64, lens: &[usize]) -> Node {
        show_log();
        let agent = Agent::start(config).unwrap();
        let buffers: Vec<Buffer> =
            lens.iter().enumerate().map(|(i, len)| Buffer::patterned(seed + i as u64, *len)).collect();
        let regions = buffers.iter().map(|buffer| agent.register(buffer.range(0, buffer.len())).unwrap()).collect();
        Node { agent, buffers, regions, events: VecDeque::new() }
    }

    pub fn connect(&self, metadata: &AgentMetadata) -> PeerId {
        self.agent.connect(metadata).unwrap()
    }

    /// Waits for the first event that `pick` takes; the others are kept in order for later.
    pub fn wait_for<T>(&mut self, what: &str, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        for at in 0..self.events.len() {
            if let Some(found) = pick(&self.events[at]) {
                self.events.remove(at);
                return found;
            }
        }
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Some(event) = self.agent.wait_event(left) else {
                panic!("{what} did not come within {LIMIT:?}; other events: {:?}", self.events);
            };
            match pick(&event) {
                Some(found) => return found,
                None => self.events.push_back(event),
            }
        }
    }

    pub fn wait_connected(&mut self) -> (PeerId, String) {
        self.wait_for("a connection", |event| match event {
            Event::PeerConnected { peer, name, .. } => Some((*peer, name.clone())),
            _ => None,
        })
    }

    pub fn wait_done(&mut self, wanted: TransferId) -> (kvferry::Result<()>, u64, u64) {
        self.wait_for("the end of a transfer", |event| match event {
            Event::TransferDone { id, result, bytes, operations, .. } if *id == wanted => {
                Some((result.clone(), *bytes, *operations))
            }
            _ => None,
        })
    }

    pub fn wait_lost(&mut self, wanted: PeerId) -> kvferry::Error {
        self.wait_for("the loss of a peer", |event| match event {
            Event::PeerLost { peer, error } if *peer == wanted => Some(error.clone()),
            _ => None,
        })
    }

    pub fn wait_message(&mut self) -> (PeerId, Vec<u8>) {
        self.wait_for("a message", |event| match event {
            Event::Message { peer, data } => Some((*peer, data.clone())),
            _ => None,
        })
    }

    /// Moves a plan's bytes and checks that it succeeded with the right figures.
    pub fn move_all(&mut self, peer: PeerId, direction: Direction, plan: CopyPlan) -> u64 {
        let expected = model_bytes(&plan);
        let id = self.agent.transfer(peer, direction, plan, 0).unwrap();
        let (result, bytes, operations) = self.wait_done(id);
        result.unwrap();
        assert_eq!(bytes, expected);
        operations
    }

    /// Of an agent that is its own peer: copies blocks between its two regions and compares every byte.
    pub fn read_from_itself(&mut self, peer: PeerId) {
        let plan = plan(0, 1, 1000, 900, vec![0, 3], vec![7, 2]);
        let mut expected = self.contents();
        model(&plan, Direction::Read, &mut expected, &mut self.contents());
        self.move_all(peer, Direction::Read, plan);
        assert_same("both", &self.contents(), &expected);
    }

    /// Deregisters the only region under a transfer into it; from then on nothing of it is written.
    pub fn deregister_under(&mut self, transfer: TransferId) {
        self.agent.deregister(self.regions[0]).unwrap();
        self.buffers[0].fill(99);
        let after = self.contents();
        if let Err(error) = self.wait_done(transfer).0 {
            assert_eq!(error.kind(), kvferry::ErrorKind::Cancelled, "{error}");
        }
        assert_same("deregistered", &self.contents(), &after);
    }

    pub fn contents(&self) -> Vec<Vec<u8>> {
        self.buffers.iter().map(Buffer::bytes).collect()
    }
}

/// Waits, without keeping a processor busy, until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that a plan moves, counted block by block.
pub fn model_bytes(plan: &CopyPlan) -> u64 {
    plan.segments.iter().map(|s| s.len * plan.lists[s.list as usize].local.len() as u64).sum()
}

/// Does to copies of both sides' memory what a transfer of `plan` should do, block by block.
pub fn model(plan: &CopyPlan, direction: Direction, local: &mut [Vec<u8>], remote: &mut [Vec<u8>]) {
    for s in plan.segments.iter() {
        let pair = &plan.lists[s.list as usize];
        for (l, r) in pair.local.ids().iter().zip(pair.remote.ids()) {
            let at = (s.local_offset + u64::from(*l) * s.local_stride) as usize;
            let there = (s.remote_offset + u64::from(*r) * s.remote_stride) as usize;
            let here = &mut local[s.local_region as usize][at..at + s.len as usize];
            let there = &mut remote[s.remote_region as usize][there..there + s.len as usize];
            match direction {
                Direction::Read => here.copy_from_slice(there),
                Direction::Write => there.copy_from_slice(here),
            }
        }
    }
}

/// Compares memory with what it should be; says where the first difference is.
pub fn assert_same(what: &str, actual: &[Vec<u8>], expected: &[Vec<u8>]) {
    assert_eq!(actual.len(), expected.len(), "{what}: regions");
    for (region, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert_eq!(a.len(), e.len(), "{what}: length of region {region}");
        if let Some(at) = difference(a, e) {
            panic!("{what}: region {region}, byte {at}: {:#x}, expected {:#x}", a[at], e[at]);
        }
    }
}

/// A plan of one segment: `len` bytes of each block, blocks `stride` apart on both sides.
pub fn plan(
    local_region: u32,
    remote_region: u32,
    stride: u64,
    len: u64,
    local: Vec<u32>,
    remote: Vec<u32>,
) -> CopyPlan {
    let segment = Segment {
        list: 0,
        local_region,
        remote_region,
        local_offset: 0,
        remote_offset: 0,
        local_stride: stride,
        remote_stride: stride,
        len,
    };
    CopyPlan { segments: [segment].into(), lists: vec![BlockPair { local: local.into(), remote: remote.into() }] }
}

/// Two regions on each side, several layers in each with different offsets and strides, two block lists.
pub fn rich_plan(random: &mut Random) -> CopyPlan {
    let mut segments = Vec::new();
    for layer in 0..3u64 {
        // Region 0: dense layers after each other, blocks of 1024 bytes, merged where ids are consecutive.
        segments.push(Segment {
            list: 0,
            local_region: 0,
            remote_region: 0,
            local_offset: layer * 64 * 1024,
            remote_offset: layer * 64 * 1024,
            local_stride: 1024,
            remote_stride: 1024,
            len: 1024,
        });
        // Region 1: blocks with a gap, other strides on either side, odd lengths.
        segments.push(Segment {
            list: 1,
            local_region: 1,
            remote_region: 1,
            local_offset: layer * 700 + 3,
            remote_offset: layer * 900,
            local_stride: 4001,
            remote_stride: 4096,
            len: 517,
        });
    }
    let count = 10 + (random.next() % 30) as usize;
    let contiguous: Vec<u32> = (5..5 + count as u32).collect();
    let lists = vec![
        BlockPair { local: random.blocks(count, 64).into(), remote: random.blocks(count, 64).into() },
        BlockPair { local: contiguous.clone().into(), remote: contiguous.into() },
    ];
    CopyPlan { segments: segments.into(), lists }
}

/// The lengths of regions that hold [`rich_plan`].
pub const RICH: [usize; 2] = [3 * 64 * 1024, 64 * 4096];
