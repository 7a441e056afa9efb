//! Transfers that several threads copy: every byte, and that nothing is copied any more when a transfer is over.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, Random, assert_same, config, model, plan, until};
use crate::common::alone::alone;
use crate::common::memory::{Buffer, pattern_bytes};
use crate::common::skip::skipped;
use kvferry::ErrorKind;
use kvferry::agent::{AgentConfig, Direction, PeerId, TransferId, Transport, Window};
use kvferry::mem::MemoryRange;
use kvferry::proto::wire::MemoryKind;

/// Large enough that copiers take part: they join a transfer after 200 us.
const LEN: usize = 12 << 20;
const BLOCK: usize = 4096;

/// The copiers of this process.
fn copiers() -> usize {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "kvf-copy"))
        .count()
}

fn node(name: &str, copy_threads: u32, seed: u64) -> Node {
    Node::start(AgentConfig { copy_threads, ..config(name, Transport::Shm) }, seed, &[LEN])
}

/// All blocks, from and to places of no order.
fn shuffled(random: &mut Random) -> kvferry::proto::plan::CopyPlan {
    let blocks = LEN / BLOCK;
    let mut ids = || random.blocks(blocks, blocks as u32);
    plan(0, 0, BLOCK as u64, BLOCK as u64, ids(), ids())
}

#[test]
fn every_byte_arrives_and_the_threads_end_with_their_agent() {
    alone!();
    let processors = std::thread::available_parallelism().unwrap().get();
    let mut random = Random(41);
    for threads in [1, 2, 8] {
        let mut a = node("a", threads, 1);
        let b = node("b", threads, 2);
        let peer = a.connect(&b.agent.metadata().unwrap());
        // A short one needs nobody.
        a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![1], vec![1]));
        assert_eq!(copiers(), 0);
        for direction in [Direction::Read, Direction::Write] {
            let (mut local, mut remote) = (a.contents(), b.contents());
            let plan = shuffled(&mut random);
            model(&plan, direction, &mut local, &mut remote);
            a.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
        }
        // A thread has its name when it runs.
        until("the copiers", || copiers() == processors.min(threads as usize) - 1);
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.operations_in_flight, stats.bytes_in_flight), (0, 0));
        assert_eq!(stats.copied_bytes, 2 * LEN as u64 + 4096);
        a.agent.shutdown(LIMIT).unwrap();
        until("the threads' end", || copiers() == 0);
    }
}

/// Its metadata does not say where missing pages come from.
#[test]
fn memory_of_an_older_peer_is_copied_by_a_copy_thread() {
    alone!();
    let mut random = Random(45);
    for threads in [1, 8] {
        let mut a = node("a", threads, 1);
        let b = node("b", threads, 2);
        let mut metadata = b.agent.metadata().unwrap();
        assert!(std::mem::take(&mut metadata.regions[0].is_filled_by_kernel));
        let peer = a.connect(&metadata);
        for direction in [Direction::Read, Direction::Write] {
            let (mut local, mut remote) = (a.contents(), b.contents());
            let plan = shuffled(&mut random);
            model(&plan, direction, &mut local, &mut remote);
            a.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
            until("the copier has its name", || copiers() == 1);
        }
        assert_eq!(a.agent.stats().unwrap().copied_bytes, 2 * LEN as u64);
        a.agent.shutdown(LIMIT).unwrap();
        until("the threads' end", || copiers() == 0);
    }
}

#[test]
fn only_bytes_that_were_moved_are_counted() {
    const HOLE: usize = 512 << 10;
    alone!();
    let mut a = Node::start(config("a", Transport::Shm), 1, &[LEN]);
    let b = Node::start(config("b", Transport::Shm), 2, &[LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let whole = || plan(0, 0, LEN as u64, LEN as u64, vec![0], vec![0]);
    a.move_all(peer, Direction::Read, whole());
    assert_same("read", &a.contents(), &b.contents());
    let expected = pattern_bytes(2, LEN);
    // Nothing of the last part can be read.
    let hole = (b.buffers[0].addr() as usize + LEN - HOLE).next_multiple_of(4096);
    let protect = |access| {
        let start = std::ptr::with_exposed_provenance_mut(hole);
        // SAFETY: these pages are the buffer's, and nothing touches them while they have no access.
        assert_eq!(unsafe { libc::mprotect(start, HOLE / 2, access) }, 0);
    };
    protect(libc::PROT_NONE);
    for direction in [Direction::Read, Direction::Write] {
        let id = a.agent.transfer(peer, direction, whole(), 0).unwrap();
        assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::Io);
        let stats = a.agent.stats().unwrap();
        let by_path = stats.copied_bytes + stats.served_bytes + stats.one_sided_bytes;
        assert_eq!(by_path, stats.bytes_read + stats.bytes_written, "{direction:?}");
    }
    protect(libc::PROT_READ | libc::PROT_WRITE);
    assert_eq!(a.agent.stats().unwrap().transfers_failed, 2);
    assert_same("the owner's", &b.contents(), &[expected]);
}

/// A transfer that has begun to copy.
fn begun(a: &Node, peer: PeerId, random: &mut Random) -> TransferId {
    let before = a.agent.stats().unwrap().copied_bytes;
    let id = a.agent.transfer(peer, Direction::Read, shuffled(random), 0).unwrap();
    until("the first bytes", || a.agent.stats().unwrap().copied_bytes > before + (1 << 20));
    id
}

#[test]
fn nothing_is_copied_any_more_when_a_transfer_was_cancelled_or_its_memory_deregistered() {
    alone!();
    let mut random = Random(42);
    let mut a = node("a", 8, 1);
    let b = node("b", 8, 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let (mut cancelled, mut seed) = (0, 10);
    // On a machine that is busy enough a transfer can end before it is cancelled; not every time.
    while cancelled < 3 && seed < 200 {
        let id = begun(&a, peer, &mut random);
        let in_time = a.agent.cancel(id).is_ok();
        let (result, bytes, _) = a.wait_done(id);
        // Copies that were still made would overwrite this.
        seed += 1;
        a.buffers[0].fill(seed);
        if let Err(error) = result {
            assert!(in_time && error.kind() == ErrorKind::Cancelled, "{error}");
            // All of it where only what was in flight was left.
            assert!(bytes <= LEN as u64);
            cancelled += 1;
        }
        assert_same("after the end", &a.contents(), &[pattern_bytes(seed, LEN)]);
    }
    assert_eq!(cancelled, 3, "of many, three are cancelled in time");
    let id = begun(&a, peer, &mut random);
    a.deregister_under(id);
}

#[test]
fn a_shutdown_waits_for_what_is_being_copied() {
    alone!();
    let mut random = Random(43);
    for round in 0..5 {
        let a = node("a", 8, 1);
        let b = node("b", 8, 2);
        let peer = a.connect(&b.agent.metadata().unwrap());
        begun(&a, peer, &mut random);
        a.agent.shutdown(LIMIT).unwrap();
        a.buffers[0].fill(100 + round);
        until("the threads' end", || copiers() == 0);
        assert_same("after the shutdown", &a.contents(), &[pattern_bytes(100 + round, LEN)]);
    }
}

#[test]
fn a_peer_that_dies_while_its_memory_is_copied_fails_the_transfer_and_nothing_else() {
    alone!();
    let mut random = Random(44);
    let mut a = node("a", 8, 1);
    let mut died = 0;
    for round in 0..100 {
        if died == 2 {
            break;
        }
        let b = Remote::spawn(Transport::Shm, 50 + round, &[LEN]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        let id = begun(&a, peer, &mut random);
        b.kill();
        if let Err(error) = a.wait_done(id).0 {
            assert!(matches!(error.kind(), ErrorKind::PeerDied | ErrorKind::Io), "{error}");
            died += 1;
        }
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.operations_in_flight, stats.bytes_in_flight, stats.transfers), (0, 0, 0));
    }
    assert_eq!(died, 2, "of many, two die in time");
    // The next one is served as if nothing had been.
    let mut b = Remote::spawn(Transport::Shm, 70, &[LEN]);
    let peer = a.connect(&b.metadata);
    let ids: Vec<u32> = (0..(LEN / BLOCK) as u32).collect();
    a.move_all(peer, Direction::Read, plan(0, 0, BLOCK as u64, BLOCK as u64, ids.clone(), ids));
    assert_same("local", &a.contents(), &[pattern_bytes(70, LEN)]);
    assert_eq!(b.ask("end"), "ended");
}

/// Memory whose pages are not there and do not come, as of a file of a server that hangs: whoever touches one waits.
struct Unresolved {
    addr: u64,
    /// The kernel asks here what is in a page, and nobody answers. `None` when it was closed, which lets all go on.
    faults: Option<OwnedFd>,
}

/// ioctl requests and constants of linux/userfaultfd.h.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFD_API: u64 = 0xaa;
const MISSING: u64 = 1;

impl Unresolved {
    /// `None`, and says so, where this process may not have such memory.
    fn new() -> Option<Unresolved> {
        let unresolved = Unresolved::still_resolved()?;
        unresolved.begin();
        Some(unresolved)
    }

    /// As [`Unresolved::new`], of pages that come until [`Unresolved::begin`].
    fn still_resolved() -> Option<Unresolved> {
        // SAFETY: a new mapping, of which only its registration with agents is used; the structures of the requests are of the
        // sizes that their numbers say.
        unsafe {
            let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            if faults < 0 {
                skipped("this process may not handle the kernel's page faults (vm.unprivileged_userfaultfd)");
                return None;
            }
            let faults = OwnedFd::from_raw_fd(faults as i32);
            let mut api = [UFFD_API, 0, 0];
            assert_eq!(libc::ioctl(faults.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()), 0);
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let memory = libc::mmap(std::ptr::null_mut(), LEN, access, flags, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            let addr = memory.expose_provenance() as u64;
            Some(Unresolved { addr, faults: Some(faults) })
        }
    }

    fn begin(&self) {
        let mut range = [self.addr, LEN as u64, MISSING, 0];
        let faults = self.faults.as_ref().unwrap().as_raw_fd();
        // SAFETY: the structure of the request is of the size that its number says.
        assert_eq!(unsafe { libc::ioctl(faults, UFFDIO_REGISTER, range.as_mut_ptr()) }, 0);
    }

    /// Waits until somebody waits for a page.
    fn wait_for_a_touch(&self) {
        let fd = self.faults.as_ref().unwrap().as_raw_fd();
        let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        until("a page is touched", || unsafe { libc::poll(&raw mut entry, 1, 0) } == 1);
    }

    /// An agent with it as its only region.
    fn node(&self) -> Node {
        self.node_with(config("hung", Transport::Shm))
    }

    fn node_with(&self, config: AgentConfig) -> Node {
        let mut node = Node::start(config, 2, &[]);
        // SAFETY: it stays mapped until the process ends.
        let range = unsafe { MemoryRange::new(self.addr, LEN as u64, MemoryKind::Host) }.unwrap();
        node.regions.push(node.agent.register(range).unwrap());
        node
    }

    /// Its first block, when it is there.
    fn block(&self) -> Vec<u8> {
        // SAFETY: it stays mapped until the process ends, and nothing writes to it now.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.addr as usize), BLOCK) }.to_vec()
    }
}

#[test]
fn owners_say_which_memory_the_kernel_alone_fills() {
    alone!();
    let mut node = Node::start(config("owner", Transport::Shm), 2, &[LEN]);
    let mut expected = vec![true];
    let mut register = |addr: *mut libc::c_void, is_filled: bool| {
        assert_ne!(addr, libc::MAP_FAILED);
        // SAFETY: it stays mapped until the process ends.
        let range = unsafe { MemoryRange::new(addr.expose_provenance() as u64, 8192, MemoryKind::Host) }.unwrap();
        node.regions.push(node.agent.register(range).unwrap());
        expected.push(is_filled);
    };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let map = |flags: i32, fd: i32| {
        // SAFETY: a new mapping, which nothing but these registrations uses.
        unsafe { libc::mmap(std::ptr::null_mut(), 8192, access, flags, fd, 0) }
    };
    register(map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1), true);
    register(map(libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1), true);
    // SAFETY: the name is a string of C's.
    let memory = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"kv".as_ptr(), libc::MFD_CLOEXEC)) };
    // SAFETY: changes the length of a file of this test's.
    assert_eq!(unsafe { libc::ftruncate(memory.as_raw_fd(), 8192) }, 0);
    register(map(libc::MAP_SHARED, memory.as_raw_fd()), true);
    let program = fs::File::open(std::env::current_exe().unwrap()).unwrap();
    register(map(libc::MAP_PRIVATE, program.as_raw_fd()), false);
    if let Some(unresolved) = Unresolved::new() {
        register(std::ptr::with_exposed_provenance_mut(unresolved.addr as usize), false);
        register(map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1), true);
    }
    let metadata = node.agent.metadata().unwrap();
    assert_eq!(metadata.regions.iter().map(|region| region.is_filled_by_kernel).collect::<Vec<_>>(), expected);
}

/// Its pages stopped coming after its owner had registered it.
#[test]
fn memory_that_changes_after_its_registration_hangs_no_call() {
    alone!();
    let Some(mut unresolved) = Unresolved::still_resolved() else { return };
    let hung = unresolved.node();
    let metadata = hung.agent.metadata().unwrap();
    assert!(metadata.regions[0].is_filled_by_kernel);
    unresolved.begin();
    let mut a = Node::start(config("a", Transport::Shm), 1, &[LEN]);
    let peer = a.connect(&metadata);
    a.wait_connected();
    let all = || plan(0, 0, LEN as u64, LEN as u64, vec![0], vec![0]);
    let id = a.agent.transfer(peer, Direction::Read, all(), 0).unwrap();
    unresolved.wait_for_a_touch();
    assert_eq!(a.agent.wait_transfer(id, LATE).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(a.agent.poll_event().is_none());
    unresolved.faults = None;
    a.wait_done(id).0.unwrap();
    assert_same("zeros", &a.contents(), &[vec![0; LEN]]);
}

#[test]
fn a_page_that_never_comes_holds_up_nobody_else_and_keeps_its_memory() {
    alone!();
    let Some(mut unresolved) = Unresolved::new() else { return };
    let config = |name: &str| AgentConfig {
        // The other peer, which is asked to release the region too, has time for that.
        cancel_grace: Duration::from_secs(10),
        deregister_timeout: Duration::from_millis(200),
        ..config(name, Transport::Shm)
    };
    let mut a = Node::start(config("a"), 1, &[LEN, LEN]);
    let hung = unresolved.node();
    let good = Node::start(config("c"), 3, &[LEN, LEN]);
    let (bad, peer) = (a.connect(&hung.agent.metadata().unwrap()), a.connect(&good.agent.metadata().unwrap()));
    let ids: Vec<u32> = (0..(LEN / BLOCK) as u32).collect();
    let all = |local, remote| plan(local, remote, BLOCK as u64, BLOCK as u64, ids.clone(), ids.clone());
    // Enough for all copiers, and more than one transfer.
    let stuck = [Direction::Read, Direction::Write, Direction::Read]
        .map(|way| a.agent.transfer(bad, way, all(0, 0), 0).unwrap());
    unresolved.wait_for_a_touch();
    for seed in 50..53 {
        good.buffers[1].fill(seed);
        a.move_all(peer, Direction::Read, all(1, 1));
        assert_same("of the other peer", &a.contents()[1..], &[pattern_bytes(seed, LEN)]);
    }
    assert!(a.agent.poll_event().is_none_or(|event| !format!("{event:?}").contains("TransferDone")));
    for id in stuck {
        a.agent.cancel(id).unwrap();
    }
    let error = a.wait_lost(bad);
    assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
    // One of them at least is in the kernel, which may still write, so it is not over and its memory not free.
    assert!(a.agent.stats().unwrap().transfers > 0);
    assert_eq!(a.agent.deregister(a.regions[0]).unwrap_err().kind(), ErrorKind::Timeout);
    a.move_all(peer, Direction::Read, all(1, 1));
    // Whoever waits goes on, and all comes to its end.
    unresolved.faults = None;
    for id in stuck {
        let error = a.wait_done(id).0.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::PeerDied), "{error}");
    }
    until("the region is given up", || {
        a.agent.deregister(a.regions[0]).is_err_and(|e| e.kind() == ErrorKind::NotFound)
    });
    a.move_all(peer, Direction::Read, all(1, 0));
    assert_same("afterwards", &a.contents()[1..], &[pattern_bytes(3, LEN)]);
    a.agent.shutdown(LIMIT).unwrap();
    until("the threads' end", || copiers() == 0);
}

#[test]
fn a_shutdown_says_that_memory_must_stay_which_the_kernel_may_still_write() {
    alone!();
    let Some(unresolved) = Unresolved::new() else { return };
    let mut a = node("a", 2, 1);
    let hung = unresolved.node();
    let peer = a.connect(&hung.agent.metadata().unwrap());
    let id = a.agent.transfer(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0).unwrap();
    // One that no copier has begun would be withdrawn.
    unresolved.wait_for_a_touch();
    let error = a.agent.shutdown(Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(a.agent.shutdown(LIMIT).unwrap_err(), error, "the same to whoever asks again");
    let error = a.wait_done(id).0.unwrap_err();
    assert!(error.message().contains("must stay alive"), "{error}");
    drop(unresolved);
    until("the threads' end", || copiers() == 0);
}

/// What becomes of the writer of a copy that does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Stays,
    Disconnects,
    /// Its own time for the cancelled copy to end is up.
    GivesUp,
    ShutsDown,
}

#[test]
fn memory_is_not_given_back_while_a_writer_that_leaves_copies() {
    alone!();
    for writer in [Writer::Stays, Writer::Disconnects, Writer::GivesUp, Writer::ShutsDown] {
        let Some(mut unresolved) = Unresolved::new() else { return };
        // Whoever says nothing is given up after a moment.
        let hasty = |name: &str| AgentConfig {
            cancel_grace: Duration::from_millis(50),
            deregister_timeout: Duration::from_millis(500),
            ..config(name, Transport::Shm)
        };
        let mut owner = unresolved.node_with(hasty("owner"));
        let patient = AgentConfig { cancel_grace: LIMIT, ..hasty("a") };
        let mut a = Node::start(if writer == Writer::GivesUp { hasty("a") } else { patient }, 1, &[BLOCK]);
        let metadata = owner.agent.metadata().unwrap();
        let peer = a.connect(&metadata);
        a.wait_connected();
        let id = a.agent.transfer(peer, Direction::Write, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0).unwrap();
        unresolved.wait_for_a_touch();
        match writer {
            Writer::Stays => {}
            Writer::Disconnects => a.agent.disconnect(peer).unwrap(),
            Writer::GivesUp => {
                a.agent.cancel(id).unwrap();
                a.wait_lost(peer);
            }
            Writer::ShutsDown => {
                let error = a.agent.shutdown(Duration::from_secs(1)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            }
        }
        for _ in 0..2 {
            let ended = owner.agent.deregister(owner.regions[0]);
            assert_eq!(ended.map_err(|error| error.kind()), Err(ErrorKind::Timeout), "{writer:?}");
        }
        let again = (writer == Writer::Disconnects).then(|| a.connect(&metadata));
        if let Some(again) = again {
            a.agent.send(again, vec![7; 5]).unwrap();
        }
        unresolved.faults = None;
        if writer == Writer::ShutsDown {
            // Nobody is left who could say that the copy has ended.
            assert_eq!(owner.agent.deregister(owner.regions[0]).unwrap_err().kind(), ErrorKind::Timeout);
            continue;
        }
        until("the memory is given back", || match owner.agent.deregister(owner.regions[0]) {
            Ok(()) => true,
            Err(error) => error.kind() == ErrorKind::NotFound,
        });
        assert_same("what was written before", &[unresolved.block()], &[pattern_bytes(1, BLOCK)]);
        let _ = a.wait_done(id);
        if let Some(again) = again {
            assert_eq!(a.wait_connected().0, again, "when the last connection has ended");
            assert_eq!(owner.wait_message().1, [7; 5]);
        }
        for agent in [&a.agent, &owner.agent] {
            agent.shutdown(LIMIT).unwrap();
        }
    }
}

/// The leaver answers nothing any more, so the owner gives it up, which ends no copy.
#[test]
fn memory_stays_in_use_when_its_owner_gives_up_the_writer() {
    alone!();
    let Some(mut unresolved) = Unresolved::new() else { return };
    let hasty = AgentConfig {
        cancel_grace: Duration::from_millis(50),
        deregister_timeout: Duration::from_millis(500),
        ..config("owner", Transport::Shm)
    };
    let mut owner = unresolved.node_with(hasty);
    let buffer = Buffer::new(BLOCK);
    owner.regions.push(owner.agent.register(buffer.range(0, BLOCK)).unwrap());
    let mut a = Node::start(config("a", Transport::Shm), 1, &[BLOCK]);
    let there = a.connect(&owner.agent.metadata().unwrap());
    a.wait_connected();
    let here = owner.connect(&a.agent.metadata().unwrap());
    owner.wait_connected();
    let write = a.agent.transfer(there, Direction::Write, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0).unwrap();
    unresolved.wait_for_a_touch();
    a.agent.disconnect(there).unwrap();
    let (agent, region) = (owner.agent.clone(), owner.regions[0]);
    let deregister = || agent.deregister(region).map_err(|error| error.kind());
    assert_eq!(deregister(), Err(ErrorKind::Timeout));
    let read = owner.agent.transfer(here, Direction::Read, plan(1, 0, 512, 500, vec![1, 0], vec![0, 3]), 0).unwrap();
    // It may be lost by then.
    let _ = owner.agent.cancel(read);
    owner.wait_lost(here);
    assert_eq!(deregister(), Err(ErrorKind::Timeout));
    unresolved.faults = None;
    assert!(a.wait_done(write).0.is_err());
    a.agent.shutdown(LIMIT).unwrap();
    // Nobody could say that the copy has ended.
    assert_eq!(deregister(), Err(ErrorKind::Timeout));
    assert_eq!(agent.shutdown(Duration::from_secs(1)).unwrap_err().kind(), ErrorKind::Timeout);
}

/// A process that is stopped may be in the midst of a copy, whatever else is cancelled with it. One that was killed is not.
#[test]
fn shutdown_tells_a_peer_that_stands_still_from_a_dead_one() {
    alone!();
    for is_killed in [false, true] {
        // It asks the peer for digests, which no copy of the kernel's brings.
        let mut a = Node::start(AgentConfig { verify: true, ..config("a", Transport::Shm) }, 1, &[BLOCK]);
        let b = Remote::spawn(Transport::Shm, 2, &[BLOCK]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        b.signal("STOP");
        let read = plan(0, 0, 512, 500, vec![1, 0], vec![0, 3]);
        let read = a.agent.transfer(peer, Direction::Read, read, 0).unwrap();
        let agent = a.agent.clone();
        let ending = std::thread::spawn(move || agent.shutdown(Duration::from_secs(if is_killed { 100 } else { 3 })));
        if is_killed {
            b.kill();
        }
        let ended = ending.join().unwrap().map_err(|error| error.kind());
        assert_eq!(ended, if is_killed { Ok(()) } else { Err(ErrorKind::Timeout) });
        assert!(a.wait_done(read).0.is_err());
    }
}

/// Long enough for whoever waits for a page to count as stuck.
const LATE: Duration = Duration::from_millis(600);

#[test]
fn a_page_that_comes_late_stops_nobody_for_good() {
    alone!();
    for copy_threads in [1, 2] {
        let Some(mut unresolved) = Unresolved::new() else { return };
        let mut a = node("a", copy_threads, 1);
        let slow = unresolved.node();
        let peer = a.connect(&slow.agent.metadata().unwrap());
        let one = |block: u32| plan(0, 0, 4096, 4096, vec![block], vec![block]);
        let late = a.agent.transfer(peer, Direction::Read, one(0), 0).unwrap();
        unresolved.wait_for_a_touch();
        let waits = a.agent.transfer(peer, Direction::Read, one(1), 0).unwrap();
        std::thread::sleep(LATE);
        unresolved.faults = None;
        a.wait_done(late).0.unwrap();
        a.wait_done(waits).0.unwrap();
        a.move_all(peer, Direction::Read, one(2));
        let good = node("c", copy_threads, 3);
        let peer = a.connect(&good.agent.metadata().unwrap());
        a.move_all(peer, Direction::Read, one(3));
        let zeros = [vec![0; 3 * 4096], pattern_bytes(3, LEN)[3 * 4096..4 * 4096].to_vec()].concat();
        assert_same("local", &[a.contents()[0][..4 * 4096].to_vec()], &[zeros]);
    }
}

#[test]
fn a_process_that_hangs_holds_one_copier_however_often_it_connects_and_no_room_of_others() {
    alone!();
    let Some(unresolved) = Unresolved::new() else { return };
    let mut a = Node::start(
        AgentConfig {
            cancel_grace: Duration::from_millis(20),
            total_window: Some(Window { operations: 256, bytes: 512 << 10 }),
            ..config("a", Transport::Shm)
        },
        1,
        &[LEN],
    );
    let hung = unresolved.node();
    for connection in 0..6 {
        let peer = a.connect(&hung.agent.metadata().unwrap());
        let id = a.agent.transfer(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0).unwrap();
        if connection == 0 {
            unresolved.wait_for_a_touch();
        }
        std::thread::sleep(LATE);
        a.agent.cancel(id).unwrap();
        if connection == 0 {
            a.wait_lost(peer);
        } else {
            // Nothing of it had begun.
            assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::Cancelled);
            a.agent.disconnect(peer).unwrap();
        }
    }
    assert!(copiers() <= 2, "{}", copiers());
    let good = node("c", 2, 3);
    let peer = a.connect(&good.agent.metadata().unwrap());
    // The first by a copier, the second, of short runs, by messages.
    a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![1], vec![1]));
    a.move_all(peer, Direction::Read, plan(0, 0, 512, 500, (0..64).rev().collect(), (0..64).collect()));
    // Until then the kernel may write its memory.
    drop(unresolved);
    a.agent.shutdown(LIMIT).unwrap();
    until("the threads' end", || copiers() == 0);
}
