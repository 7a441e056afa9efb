//! Transfers of CUDA memory: device to device, device to host, host to device, in one process and in two, every byte
//! checked. Without a CUDA device each test says that it is skipped; KVFERRY_REQUIRE=cuda makes that a failure.

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, RICH, Random, assert_same, config, model, rich_plan, transports};
use crate::common::memory::{Buffer, pattern_bytes};
use crate::common::skip::skip;
use cudarc::driver::sys;
use kvferry::ErrorKind;
use kvferry::agent::{Direction, Transport};
use kvferry::mem::cuda::{PrimaryContext, available, device_count};
use kvferry::mem::{self, MemoryRange};
use kvferry::proto::wire::MemoryKind;

/// Whether there is a device; without one the caller returns.
fn device(test: &str) -> bool {
    if available() {
        return true;
    }
    let why = device_count().map_or_else(|error| error.to_string(), |count| format!("{count} devices"));
    skip("cuda", &format!("{test}: no CUDA device ({why})"));
    false
}

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// An allocation on device 0, filled with a pattern.
struct DeviceBuffer {
    addr: u64,
    len: usize,
    context: PrimaryContext,
}

impl DeviceBuffer {
    fn patterned(seed: u64, len: usize) -> Self {
        let context = PrimaryContext::retain(0).unwrap();
        context.make_current().unwrap();
        let mut addr = 0;
        // SAFETY: writes the address of the new allocation.
        ok(unsafe { sys::cuMemAlloc_v2(&mut addr, len) });
        let buffer = DeviceBuffer { addr, len, context };
        buffer.fill(&pattern_bytes(seed, len));
        buffer
    }

    fn fill(&self, bytes: &[u8]) {
        self.context.make_current().unwrap();
        // SAFETY: the allocation has that many bytes.
        ok(unsafe { sys::cuMemcpyHtoD_v2(self.addr, bytes.as_ptr().cast(), bytes.len().min(self.len)) });
        // SAFETY: has no arguments. The copy may go on after the call that began it.
        ok(unsafe { sys::cuCtxSynchronize() });
    }

    fn bytes(&self) -> Vec<u8> {
        self.context.make_current().unwrap();
        let mut bytes = vec![0u8; self.len];
        // SAFETY: both have that many bytes.
        ok(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.addr, self.len) });
        bytes
    }

    fn range(&self) -> MemoryRange {
        range(self.addr, self.len, 0)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.context.make_current().unwrap();
        // SAFETY: allocated by `patterned`, freed once, after the agents that used it.
        ok(unsafe { sys::cuMemFree_v2(self.addr) });
    }
}

fn range(addr: u64, len: usize, device: u32) -> MemoryRange {
    // SAFETY: every test keeps its buffers until its agents are gone.
    unsafe { MemoryRange::new(addr, len as u64, MemoryKind::Cuda { device }) }.unwrap()
}

#[test]
fn the_driver_tells_device_memory_from_host_memory() {
    if !device("the_driver_tells_device_memory_from_host_memory") {
        return;
    }
    let (on_device, on_host) = (DeviceBuffer::patterned(1, 1 << 20), Buffer::patterned(2, 1 << 20));
    mem::check(&on_device.range()).unwrap();
    mem::check(&on_host.range(0, 1 << 20)).unwrap();
    let refuse = |range: MemoryRange, kind: ErrorKind, text: &str| {
        let error = mem::check(&range).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text), "{error}");
    };
    // SAFETY: only checked.
    let as_host = unsafe { MemoryRange::new(on_device.addr, 4096, MemoryKind::Host) }.unwrap();
    refuse(as_host, ErrorKind::InvalidArgument, "memory of CUDA device 0");
    refuse(range(on_host.addr(), 4096, 0), ErrorKind::InvalidArgument, "does not know");
    refuse(range(on_device.addr, 1 << 40, 0), ErrorKind::OutOfRange, "after its allocation");
    refuse(range(on_device.addr, 4096, 99), ErrorKind::InvalidArgument, "CUDA device 99");
    let mut managed = 0;
    // SAFETY: writes the address of new managed memory.
    ok(unsafe { sys::cuMemAllocManaged(&mut managed, 4096, 1) });
    refuse(range(managed, 4096, 0), ErrorKind::Unsupported, "managed");
    // SAFETY: allocated above, freed once.
    ok(unsafe { sys::cuMemFree_v2(managed) });
}

/// An agent of one process with regions on the device.
struct DeviceNode {
    node: Node,
    buffers: Vec<DeviceBuffer>,
}

impl DeviceNode {
    fn start(name: &str, transport: Transport, seed: u64) -> Self {
        let node = Node::start(config(name, transport), 0, &[]);
        let buffers: Vec<DeviceBuffer> =
            RICH.iter().enumerate().map(|(i, len)| DeviceBuffer::patterned(seed + i as u64, *len)).collect();
        for buffer in &buffers {
            node.agent.register(buffer.range()).unwrap();
        }
        DeviceNode { node, buffers }
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        self.buffers.iter().map(DeviceBuffer::bytes).collect()
    }
}

#[test]
fn device_and_host_memory_of_two_agents_in_one_process() {
    if !device("device_and_host_memory_of_two_agents_in_one_process") {
        return;
    }
    let mut random = Random(21);
    for transport in transports() {
        let mut a = DeviceNode::start("a", transport, 10);
        let b = DeviceNode::start("b", transport, 20);
        let c = Node::start(config("c", transport), 30, &RICH);
        let to_b = a.node.connect(&b.node.agent.metadata().unwrap());
        let to_c = a.node.connect(&c.agent.metadata().unwrap());
        for direction in [Direction::Read, Direction::Write] {
            let plan = rich_plan(&mut random);
            let (mut local, mut remote) = (a.contents(), b.contents());
            model(&plan, direction, &mut local, &mut remote);
            a.node.move_all(to_b, direction, plan);
            assert_same("device, local", &a.contents(), &local);
            assert_same("device, remote", &b.contents(), &remote);

            let plan = rich_plan(&mut random);
            let (mut local, mut remote) = (a.contents(), c.contents());
            model(&plan, direction, &mut local, &mut remote);
            a.node.move_all(to_c, direction, plan);
            assert_same("mixed, local", &a.contents(), &local);
            assert_same("mixed, remote", &c.contents(), &remote);
        }
        let way = a.node.agent.route(to_b).unwrap().unwrap().device;
        assert_eq!(way.starts_with("copied by the device"), transport != Transport::Tcp, "{transport:?}: {way}");
        for node in [&a.node, &b.node, &c] {
            node.agent.shutdown(LIMIT).unwrap();
        }
    }
}

#[test]
fn device_memory_and_a_host_in_another_process() {
    if !device("device_memory_and_a_host_in_another_process") {
        return;
    }
    let mut random = Random(22);
    for transport in transports() {
        let mut a = DeviceNode::start("a", transport, 10);
        let mut b = Remote::spawn(transport, 20, &RICH);
        let peer = a.node.connect(&b.metadata);
        for direction in [Direction::Read, Direction::Write] {
            let plan = rich_plan(&mut random);
            let (mut local, mut remote) = (a.contents(), b.contents());
            model(&plan, direction, &mut local, &mut remote);
            a.node.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
        }
        b.end();
        a.node.agent.shutdown(LIMIT).unwrap();
    }
}
