//! Active messages as they arrive: copied out of UCX's callback. One that is only announced (rendezvous) is refused: anybody
//! who reaches UCX's port could announce any number of large ones in a few bytes each, and no agent sends that way.

use std::cell::Cell;
use std::os::raw::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;

use ucx_sys::{ucp_am_recv_param_t, ucs_status_t};

use super::queue::Queue;

/// An active message that has arrived whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AmMessage {
    /// The id under which it was sent.
    pub id: u16,
    /// The sender's header.
    pub header: Vec<u8>,
    /// The sender's data; empty if the sink took it.
    pub data: Vec<u8>,
}

/// Takes the data of messages while it lies in UCX's own buffer.
pub trait MessageSink {
    /// True if it took the data: then only the header is [delivered](super::Worker::poll_message). Called on the thread
    /// that drives the worker, while UCX works: must not use UCX, wait or panic (a panic counts as not taken).
    fn take(&self, header: &[u8], data: &[u8]) -> bool;
}

/// A worker's messages.
pub(super) struct Messages {
    ready: Queue<AmMessage>,
    limit: usize,
    dropped: Cell<u64>,
    refused: Cell<u64>,
}

/// The argument that UCX hands to the callback: one per accepted id, alive as long as the UCX worker.
pub(super) struct MessageSlot {
    messages: Rc<Messages>,
    id: u16,
    sink: Option<Rc<dyn MessageSink>>,
}

impl MessageSlot {
    pub(super) fn new(messages: &Rc<Messages>, id: u16, sink: Option<Rc<dyn MessageSink>>) -> Self {
        Self { messages: Rc::clone(messages), id, sink }
    }
}

impl Messages {
    pub(super) fn new(limit: usize) -> Self {
        Self { ready: Queue::new(), limit, dropped: Cell::new(0), refused: Cell::new(0) }
    }

    pub(super) fn pop(&self) -> Option<AmMessage> {
        self.ready.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.get()
    }

    fn count_dropped(&self) {
        self.dropped.set(self.dropped.get().saturating_add(1));
    }
}

/// UCX's callback for a message. Copies it; calls nothing of UCX, drops nothing of UCX's, and cannot
/// unwind: allocations are tried, and a message without room is counted and dropped.
pub(super) unsafe extern "C" fn on_message(
    slot: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: `slot` is the argument given with the handler; it lives as long as the UCX worker.
    let slot = unsafe { &*slot.cast::<MessageSlot>() };
    let messages = &*slot.messages;
    // SAFETY: UCX passes valid parameters for the time of the callback.
    let announced = unsafe { (*param).recv_attr } & u64::from(ucx_sys::UCP_AM_RECV_ATTR_FLAG_RNDV.0) != 0;
    if announced {
        messages.count_dropped();
        messages.refused.set(messages.refused.get().saturating_add(1));
        // Ends the sender's operation with this error.
        return ucx_sys::UCS_ERR_UNSUPPORTED;
    }
    // SAFETY: UCX says that the header has this many bytes, valid during the callback.
    let header = unsafe { copy(header, header_length) };
    let (Some(header), true) = (header, length <= messages.limit) else {
        messages.count_dropped();
        // Only this is allowed for a message that is here already.
        return ucx_sys::UCS_OK;
    };
    if let Some(sink) = slot.sink.as_ref().filter(|_| length > 0) {
        // SAFETY: without the rendezvous flag, which was looked at, `data` points to `length` bytes, valid and unchanged during the callback.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
        let taken = catch_unwind(AssertUnwindSafe(|| sink.take(&header, bytes))).unwrap_or_else(|payload| {
            // It may panic again when it is dropped.
            std::mem::forget(payload);
            false
        });
        if taken {
            messages.ready.push(AmMessage { id: slot.id, header, data: Vec::new() });
            return ucx_sys::UCS_OK;
        }
    }
    // SAFETY: as above.
    match unsafe { copy(data, length) } {
        Some(data) => messages.ready.push(AmMessage { id: slot.id, header, data }),
        None => messages.count_dropped(),
    }
    ucx_sys::UCS_OK
}

/// # Safety
/// When `length` is not 0, `start` points to that many readable bytes.
unsafe fn copy(start: *const c_void, length: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    if length == 0 {
        return Some(bytes);
    }
    bytes.try_reserve_exact(length).ok()?;
    // SAFETY: room was reserved, the source is readable as promised, and a fresh allocation overlaps nothing.
    unsafe {
        ptr::copy_nonoverlapping(start.cast::<u8>(), bytes.as_mut_ptr(), length);
        bytes.set_len(length);
    }
    Some(bytes)
}
