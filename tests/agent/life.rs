//! An agent's life: registration, metadata, idling, drivers, shutting down.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, assert_same, config, plan, wire};
use crate::common::memory::{Buffer, pattern_bytes};
use kvferry::ErrorKind;
use kvferry::agent::{
    Agent, AgentConfig, Context, Direction, Driver, Event, PeerId, RegionId, Transport, Window, encode_metadata,
};
use kvferry::mem::MemoryRange;
use kvferry::proto::wire::{AgentMetadata, MemoryKind};

#[test]
fn metadata_does_not_grow_with_blocks() {
    // One million blocks of 64 bytes against a thousand of them, in as many regions.
    let size = |blocks: usize| {
        let node = Node::start(config("a", wire()), 1, &[]);
        let buffer = vec![0u8; blocks * 64];
        // SAFETY: the buffer outlives the agent, which is shut down below.
        let range = unsafe { MemoryRange::new(buffer.as_ptr() as u64, buffer.len() as u64, MemoryKind::Host) }.unwrap();
        node.agent.register(range).unwrap();
        let size = encode_metadata(&node.agent.metadata().unwrap()).unwrap().len();
        node.agent.shutdown(LIMIT).unwrap();
        size
    };
    let (small, large) = (size(1000), size(1_000_000));
    // Only the width of the length's own number may differ.
    assert!(large.abs_diff(small) <= 8, "{small} and {large} bytes");
}

#[test]
fn bad_memory_is_refused_and_the_agent_goes_on() {
    let node = Node::start(config("a", wire()), 1, &[64 << 10]);
    let refuse = |range: MemoryRange, kind: ErrorKind, text: &str| {
        let error = node.agent.register(range).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text), "{error}");
    };
    let buffer = &node.buffers[0];
    // Freed memory: a mapping that is gone, or what another thread's allocator has reserved there since.
    let freed = {
        let large = Buffer::patterned(3, 64 << 20);
        large.range(0, 64 << 20)
    };
    refuse(freed, ErrorKind::OutOfRange, "cannot be registered");
    // SAFETY: nothing is accessed, because it is refused.
    let range = |addr, len, kind| unsafe { MemoryRange::new(addr, len, kind) }.unwrap();
    refuse(range(1 << 46, 1 << 40, MemoryKind::Host), ErrorKind::OutOfRange, "not mapped into this process");
    refuse(range(main as *const () as u64, 8, MemoryKind::Host), ErrorKind::OutOfRange, "not mapped for reading and");
    if !kvferry::mem::cuda::available() {
        let device = range(buffer.addr() + (1 << 30), 8, MemoryKind::Cuda { device: 0 });
        let error = node.agent.register(device).unwrap_err();
        assert!(error.message().contains("cannot be registered"), "{error}");
    }
    let more = Buffer::patterned(4, 4096);
    let region = node.agent.register(more.range(0, 4096)).unwrap();
    assert_eq!(region.index(), 1);
    node.agent.deregister(region).unwrap();
    assert_eq!(node.agent.deregister(region).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(node.agent.deregister(RegionId::from_raw(1)).unwrap_err().kind(), ErrorKind::NotFound);
    let stats = node.agent.stats().unwrap();
    assert_eq!((stats.regions, stats.region_bytes), (1, 64 << 10));
}

fn main() {}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    let refuse = |config: AgentConfig, kind: ErrorKind, text: &str| {
        let error = Agent::start(config).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text), "{error}");
    };
    let with = |name: &str, value: &str| AgentConfig {
        ucx: [(name.to_owned(), value.to_owned())].into(),
        ..AgentConfig::default()
    };
    refuse(config("", Transport::Auto), ErrorKind::InvalidArgument, "name");
    refuse(with("NO_SUCH_THING", "1"), ErrorKind::InvalidArgument, "NO_SUCH_THING");
    refuse(AgentConfig { transport: Transport::Tcp, ..with("TLS", "tcp") }, ErrorKind::InvalidArgument, "TLS");
    let elsewhere = AgentConfig { ucx_lib: Some("/nowhere/libucp.so.0".into()), ..AgentConfig::default() };
    let error = Agent::start(elsewhere).unwrap_err();
    assert!(error.message().contains("/nowhere/libucp.so.0"), "{error}");
}

#[test]
fn shutting_down_ends_what_is_in_flight_with_one_event_each() {
    for hangs in [false, true] {
        let mut a = Node::start(
            AgentConfig { peer_window: Window { operations: 2, bytes: 1 << 20 }, ..config("a", wire()) },
            1,
            &[8 << 20],
        );
        let b = Remote::spawn(wire(), 2, &[8 << 20]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        if hangs {
            b.signal("STOP");
        }
        let ids: Vec<u32> = (0..8192).collect();
        let mut transfers: Vec<_> = [Direction::Read, Direction::Write, Direction::Read]
            .into_iter()
            .map(|way| a.agent.transfer(peer, way, plan(0, 0, 1024, 1000, ids.clone(), ids.clone()), 0).unwrap())
            .collect();
        // A peer that hangs is left by force in the middle of the time.
        a.agent.shutdown(Duration::from_secs(20)).unwrap();
        a.buffers[0].fill(7);
        while let Some(event) = a.agent.poll_event() {
            if let Event::TransferDone { id, result, .. } = event {
                let at = transfers.iter().position(|known| *known == id).expect("each ends once");
                transfers.remove(at);
                match result {
                    // Without a hanging peer a transfer may be faster than the shutdown.
                    Ok(()) => assert!(!hangs),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::ShutDown, "{error}"),
                }
            }
        }
        assert!(transfers.is_empty(), "{transfers:?} did not end");
        assert!(a.agent.wait_event(LIMIT).is_none());
        if hangs {
            b.signal("CONT");
        }
        // The other side lives on.
        b.end();
        assert_same("after", &a.contents(), &[pattern_bytes(7, 8 << 20)]);
    }
}

#[test]
fn dropping_the_last_handle_shuts_down() {
    let mut a = Node::start(config("a", wire()), 1, &[4096]);
    let b = Node::start(config("b", wire()), 2, &[4096]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.wait_connected();
    let clone = b.agent.clone();
    drop(b.agent);
    clone.stats().unwrap();
    drop(clone);
    assert_eq!(a.wait_lost(peer).kind(), ErrorKind::PeerDied);
}

/// Answers every message, has a ZMQ socket and a timer, and tells the test what it sees.
struct Rider {
    seen: Sender<String>,
    socket: zmq::Socket,
    connect_to: Option<AgentMetadata>,
    peer: Option<PeerId>,
    timer: Option<Instant>,
    closing: bool,
}

impl Driver for Rider {
    fn turn(&mut self, context: &mut Context<'_>) -> Option<Instant> {
        if let Some(metadata) = self.connect_to.take() {
            let peer = context.connect(&metadata).unwrap();
            // Bad plans are refused here, good ones end with an event.
            assert_eq!(
                context.transfer(peer, Direction::Read, plan(5, 0, 1, 1, vec![0], vec![0]), 0).unwrap_err().kind(),
                ErrorKind::NotFound
            );
            context.transfer(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![1]), 0).unwrap();
            self.peer = Some(peer);
        }
        while let Some(event) = context.poll_event() {
            match event {
                Event::TransferDone { result, bytes, .. } => {
                    result.unwrap();
                    self.seen.send(format!("moved {bytes}")).unwrap();
                    context.send(self.peer.unwrap(), b"abc".to_vec()).unwrap();
                }
                Event::Message { data, .. } => {
                    self.seen.send(format!("message {}", String::from_utf8(data).unwrap())).unwrap();
                    self.timer = Some(context.now() + Duration::from_millis(5));
                }
                Event::PeerConnected { name, .. } => self.seen.send(format!("connected {name}")).unwrap(),
                Event::PeerLost { .. } => self.seen.send("lost".to_owned()).unwrap(),
            }
        }
        if self.timer.is_some_and(|at| at <= context.now()) {
            self.timer = None;
            self.seen.send("timer".to_owned()).unwrap();
        }
        while let Ok(Ok(text)) = self.socket.recv_string(zmq::DONTWAIT) {
            self.seen.send(format!("socket {text}")).unwrap();
        }
        assert_eq!(context.is_shutting_down(), self.closing);
        self.timer
    }

    fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        items.push(self.socket.as_poll_item(zmq::POLLIN));
    }

    fn shut_down(&mut self, context: &mut Context<'_>) {
        self.closing = true;
        context.send(self.peer.unwrap(), b"bye".to_vec()).unwrap();
    }
}

#[test]
fn a_driver_runs_with_events_sockets_and_timers() {
    let mut other = Node::start(config("other", wire()), 5, &[8192]);
    let metadata = other.agent.metadata().unwrap();
    let (seen, sights) = channel();
    let context = zmq::Context::new();
    let sender = context.socket(zmq::PAIR).unwrap();
    sender.bind("inproc://rider").unwrap();
    let in_thread = context.clone();
    let (go, ready) = channel::<()>();
    let agent = Agent::start_with(
        config("carrier", wire()),
        Box::new(move |_waker| {
            let socket = in_thread.socket(zmq::PAIR).unwrap();
            socket.connect("inproc://rider").unwrap();
            // Made before the test registers memory, first turned after it.
            Box::new(Late {
                ready,
                rider: Some(Rider {
                    seen,
                    socket,
                    connect_to: Some(metadata),
                    peer: None,
                    timer: None,
                    closing: false,
                }),
                riding: None,
            })
        }),
    )
    .unwrap();
    // The handle's verbs work beside the driver.
    let buffer = Buffer::patterned(1, 4096);
    let region = agent.register(buffer.range(0, 4096)).unwrap();
    assert_eq!(agent.metadata().unwrap().regions.len(), 1);
    go.send(()).unwrap();
    agent.waker().wake();
    let next = || sights.recv_timeout(LIMIT).unwrap();
    assert_eq!(next(), "connected other");
    assert_eq!(next(), "moved 4096");
    assert_same("moved", &[buffer.bytes()], &[other.contents()[0][4096..].to_vec()]);
    let (peer, data) = other.wait_message();
    assert_eq!(data, b"abc");
    other.agent.send(peer, b"def".to_vec()).unwrap();
    assert_eq!(next(), "message def");
    assert_eq!(next(), "timer");
    // The loop sleeps now; a socket wakes it.
    sender.send("one", 0).unwrap();
    assert_eq!(next(), "socket one");
    sender.send("two", 0).unwrap();
    assert_eq!(next(), "socket two");
    assert!(agent.poll_event().is_none(), "events are the driver's");
    agent.deregister(region).unwrap();
    agent.shutdown(LIMIT).unwrap();
    // What it sent last still arrived, and it is gone.
    assert_eq!(other.wait_message(), (peer, b"bye".to_vec()));
    assert!(sights.recv_timeout(LIMIT).is_err());
}

/// Lets a rider ride from the moment it is told to.
struct Late {
    ready: std::sync::mpsc::Receiver<()>,
    rider: Option<Rider>,
    riding: Option<Rider>,
}

impl Driver for Late {
    fn turn(&mut self, context: &mut Context<'_>) -> Option<Instant> {
        if self.riding.is_none() && self.ready.try_recv().is_ok() {
            self.riding = self.rider.take();
        }
        self.riding.as_mut()?.turn(context)
    }

    fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        if let Some(rider) = &self.riding {
            rider.poll_items(items);
        }
    }

    fn shut_down(&mut self, context: &mut Context<'_>) {
        self.riding.as_mut().unwrap().shut_down(context);
    }
}

#[test]
fn what_was_sent_before_the_end_arrives() {
    let mut other = Node::start(config("b", wire()), 1, &[]);
    let metadata = other.agent.metadata().unwrap();
    for number in 0..10u8 {
        let node = Node::start(config("a", wire()), 1, &[]);
        // The other one has not answered yet.
        let peer = node.connect(&metadata);
        for part in 0..3 {
            node.agent.send(peer, vec![number, part]).unwrap();
        }
        node.agent.shutdown(LIMIT).unwrap();
        for part in 0..3 {
            assert_eq!(other.wait_message().1, [number, part]);
        }
    }
}

#[test]
fn the_end_does_not_wait_for_ever_for_a_peer_that_takes_no_messages() {
    let grace = Duration::from_millis(100);
    let remote = Remote::spawn(wire(), 1, &[]);
    let mut node = Node::start(AgentConfig { cancel_grace: grace, ..config("a", wire()) }, 1, &[]);
    let peer = node.connect(&remote.metadata);
    node.agent.send(peer, b"ab".to_vec()).unwrap();
    assert_eq!(node.wait_message().1, b"ba");
    remote.signal("STOP");
    let stranger = Node::start(AgentConfig { cancel_grace: grace, ..config("c", wire()) }, 1, &[]);
    let unanswered = stranger.connect(&remote.metadata);
    stranger.agent.send(unanswered, b"anyone there?".to_vec()).unwrap();
    // More than the sockets take.
    while node.agent.send(peer, vec![0; 8 << 20]).is_ok() {}
    for agent in [&node.agent, &stranger.agent] {
        agent.shutdown(LIMIT).unwrap();
    }
    remote.kill();
}

#[test]
fn a_driver_that_panics_takes_nothing_but_its_agent_down() {
    struct Bad;
    impl Driver for Bad {
        fn turn(&mut self, _: &mut Context<'_>) -> Option<Instant> {
            panic!("on purpose");
        }
    }
    let agent = Agent::start_with(config("a", wire()), Box::new(|_| Box::new(Bad))).unwrap();
    assert!(agent.wait_event(LIMIT).is_none());
    assert_eq!(agent.metadata().unwrap_err().kind(), ErrorKind::ShutDown);
    let error = agent.shutdown(LIMIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
}
