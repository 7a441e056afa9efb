//! A connection from a worker to a peer's worker, and the operations over it.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::raw::c_void;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use ucx_sys::{
    ucp_dt_iov_t, ucp_ep_attr_t, ucp_ep_h, ucp_ep_params_t, ucp_request_param_t, ucp_transport_entry_t,
    ucs_status_ptr_t,
};

use super::context::c_string;
use super::cores::{EndpointCore, EndpointState, OperationOwner, Rkey, WorkerCore, on_error};
use super::envelope::{self, EnvelopeKind};
use super::memory::Memory;
use super::memory_kind::MemoryKind;
use super::request::{Buffers, Posted, PostedOperation, Purpose};
use super::status::{Status, UcxError};

/// The most parts of one message. UCX sends up to `UCP_MAX_IOV`, which is 16, in one piece without copying them, and
/// the header is one of them. With one more it cuts the message in two, and the receiver copies the halves together.
pub const MAX_PARTS: usize = 15;

/// Up to so many bytes, UCX is asked to copy a message's data and be done with it. Otherwise it sends by TCP even a single
/// byte from where it is, which takes a more costly system call and a completion.
const COPIED_BYTES: usize = 8 << 10;
const AM: &str = "ucp_am_send_nbx";

/// Part of a registered range: offset and length in bytes.
#[derive(Clone, Debug)]
pub struct MessagePart {
    /// The registration.
    pub memory: Arc<Memory>,
    /// From its begin.
    pub offset: usize,
    /// May be 0.
    pub len: usize,
}

/// A connection to a peer's worker. For the worker's thread only.
///
/// It watches the peer, whose death is noticed and reported. So UCX uses only transports that can watch: TCP and RDMA, CMA
/// with the setting `RNDV_THRESH=inf` (measured with UCX 1.22; 1.18 never), and shared memory with
/// `POSIX_ERROR_HANDLING=y` or `SYSV_ERROR_HANDLING=y` (it checks the peer's process once per `KEEPALIVE_INTERVAL`).
///
/// Dropping it closes it by force in the background: its operations end with an error, each with its
/// completion, and the worker keeps all they use until UCX has released it.
pub struct Endpoint {
    core: Rc<EndpointCore>,
}

impl Endpoint {
    pub(super) fn connect(worker: &Rc<WorkerCore>, id: u64, address: &[u8], name: &str) -> Result<Self, UcxError> {
        const OP: &str = "ucp_ep_create";
        let address = envelope::open(EnvelopeKind::Address, address)?;
        if address.is_empty() {
            return Err(UcxError::new(OP, Status::MALFORMED, "the worker address is empty"));
        }
        let c_name = c_string("endpoint name", name)?;
        let core = Rc::new(EndpointCore {
            worker: Rc::clone(worker),
            id,
            name: name.to_owned(),
            handle: Cell::new(ptr::null_mut()),
            state: Cell::new(EndpointState::Open),
            failed: Cell::new(Status::OK),
            in_flight: Cell::new(0),
        });
        // SAFETY: all-zero is valid for this C structure of integers, pointers and nullable functions.
        let mut params: ucp_ep_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = u64::from(
            ucx_sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS.0
                | ucx_sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE.0
                | ucx_sys::UCP_EP_PARAM_FIELD_ERR_HANDLER.0
                | ucx_sys::UCP_EP_PARAM_FIELD_NAME.0,
        );
        params.address = address.as_ptr().cast();
        params.name = c_name.as_ptr();
        params.err_mode = ucx_sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(on_error);
        params.err_handler.arg = Rc::as_ptr(&core).cast_mut().cast();
        worker.remember_endpoint(id, Rc::clone(&core));
        let mut handle = ptr::null_mut();
        // SAFETY: worker, address and parameters are alive during the call, which copies what it keeps; the
        // argument of the error callback is kept alive by the worker. The address is whole: see the envelope.
        let status = unsafe { core.api().ucp_ep_create(worker.handle, &params, &mut handle) };
        if let Err(error) = Status::from_raw(status).check(OP, || cannot_be_made(&core, Status::from_raw(status))) {
            worker.forget_endpoint(id);
            return Err(error);
        }
        core.handle.set(handle);
        Ok(Self { core })
    }

    /// A number that no other endpoint of this worker has or had.
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// The peer's name, as it was connected to.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// How the connection failed, if it has; reported once by
    /// [`Worker::poll_failed_endpoints`](super::Worker::poll_failed_endpoints) too.
    pub fn failure(&self) -> Option<Status> {
        let status = self.core.failed.get();
        (!status.is_ok()).then_some(status)
    }

    /// Makes a peer's exported rkey usable over this endpoint.
    ///
    /// # Errors
    /// [`Status::MALFORMED`] when the bytes are not an exported rkey or are damaged, before UCX sees them;
    /// [`Status::NOT_CONNECTED`] or the endpoint's failure; UCX's status.
    pub fn unpack_rkey(&self, bytes: &[u8]) -> Result<Rc<Rkey>, UcxError> {
        Rkey::unpack(&self.core, bytes)
    }

    /// Reads `len` bytes at `remote_addr` of the peer into `local` at `local_offset`.
    ///
    /// The operation holds the registration, the rkey and the endpoint. Until its completion the local bytes
    /// are UCX's to write.
    ///
    /// # Errors
    /// [`Status::OUT_OF_RANGE`] when either range leaves its memory; [`Status::INVALID_PARAM`] when the rkey is of
    /// another endpoint or the memory of another context; [`Status::NOT_CONNECTED`] or the endpoint's
    /// failure; UCX's status. An error returned here has no completion.
    pub fn get(
        &self,
        rkey: &Rc<Rkey>,
        remote_addr: u64,
        local: &Arc<Memory>,
        local_offset: usize,
        len: usize,
        token: u64,
    ) -> Result<Posted, UcxError> {
        const OP: &str = "ucp_get_nbx";
        self.one_sided(OP, rkey, remote_addr, local, local_offset, len, token, |ep, addr, param| {
            // SAFETY: endpoint, rkey and registration are alive and held by the operation; both ranges were checked.
            unsafe {
                self.core.api().ucp_get_nbx(
                    ep,
                    ptr::with_exposed_provenance_mut(addr),
                    len,
                    remote_addr,
                    rkey.handle(),
                    param,
                )
            }
        })
    }

    /// Writes `len` bytes of `local` at `local_offset` to `remote_addr` of the peer.
    ///
    /// Its completion says that the local bytes may be changed again, not that the peer can see the written
    /// ones: for that, wait for a [`flush`](Self::flush) posted after it. Otherwise as [`get`](Self::get).
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn put(
        &self,
        rkey: &Rc<Rkey>,
        remote_addr: u64,
        local: &Arc<Memory>,
        local_offset: usize,
        len: usize,
        token: u64,
    ) -> Result<Posted, UcxError> {
        const OP: &str = "ucp_put_nbx";
        self.one_sided(OP, rkey, remote_addr, local, local_offset, len, token, |ep, addr, param| {
            // SAFETY: endpoint, rkey and registration are alive and held by the operation; both ranges were checked.
            unsafe {
                self.core.api().ucp_put_nbx(
                    ep,
                    ptr::with_exposed_provenance(addr),
                    len,
                    remote_addr,
                    rkey.handle(),
                    param,
                )
            }
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn one_sided(
        &self,
        op: &'static str,
        rkey: &Rc<Rkey>,
        remote_addr: u64,
        local: &Arc<Memory>,
        local_offset: usize,
        len: usize,
        token: u64,
        start: impl FnOnce(ucp_ep_h, usize, &ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Result<Posted, UcxError> {
        if !Rc::ptr_eq(rkey.endpoint(), &self.core) {
            let detail = format!("the rkey was unpacked by {:?}, not by {:?}", rkey.endpoint(), self.core);
            return Err(UcxError::invalid(op, detail));
        }
        if !Arc::ptr_eq(local.context(), &self.core.worker.context) {
            return Err(UcxError::invalid(op, format!("{local:?} is of another context than {:?}", self.core)));
        }
        rkey.check(op, remote_addr, len)?;
        let addr = local.slice(op, local_offset, len)?;
        let ep = self.core.open_handle(op)?;
        if len == 0 {
            return Ok(Posted::Done);
        }
        self.post(
            op,
            token,
            Some(Rc::clone(rkey)),
            |operation| {
                operation.memory = Some(Arc::clone(local));
            },
            |_, param| {
                param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FIELD_MEMH.0 | ucx_sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE.0;
                param.memh = local.handle();
                param.memory_type = ucx_sys::ucs_memory_type_t(local.kind().code());
                start(ep, addr, param)
            },
        )
    }

    /// Sends an active message. The peer gets it if its worker
    /// [accepts](super::Worker::accept_messages) messages of this id; messages may overtake each other.
    ///
    /// The completion says that UCX is done with the data, not that the peer got them; when the peer refuses a
    /// large message as too long, it holds an error.
    ///
    /// # Errors
    /// [`Status::EXCEEDS_LIMIT`] when the header is longer than
    /// [`Worker::max_header`](super::Worker::max_header); [`Status::NOT_CONNECTED`] or the endpoint's failure;
    /// UCX's status. An error returned here has no completion.
    pub fn send_am(&self, id: u16, header: &[u8], data: Vec<u8>, token: u64) -> Result<Posted, UcxError> {
        let ep = self.check_am(header)?;
        self.post(
            AM,
            token,
            None,
            |operation| {
                operation.header.extend_from_slice(header);
                operation.data = data;
            },
            |buffers, param| {
                param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE.0;
                param.memory_type = ucx_sys::UCS_MEMORY_TYPE_HOST;
                let (data, length) = buffers.data;
                if length <= COPIED_BYTES {
                    param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FLAG_FAST_CMPL.0;
                }
                // SAFETY: the endpoint is open; header and data are owned by the operation until UCX is done.
                unsafe { self.start_am(ep, id, buffers, (data.cast(), length), param) }
            },
        )
    }

    /// As [`send_am`](Self::send_am), with 1 to [`MAX_PARTS`] parts of registered host memory as data. They are sent
    /// from where they are, so what changes there before the completion may change in the message.
    ///
    /// # Errors
    /// As `send_am`; [`Status::INVALID_PARAM`] for another number of parts, device memory, or memory of another context;
    /// [`Status::OUT_OF_RANGE`] when a part leaves its memory.
    pub fn send_am_parts(&self, id: u16, header: &[u8], parts: &[MessagePart], token: u64) -> Result<Posted, UcxError> {
        let ep = self.check_am(header)?;
        if parts.is_empty() || parts.len() > MAX_PARTS {
            return Err(UcxError::invalid(AM, format!("{} parts, expected 1 to {MAX_PARTS}", parts.len())));
        }
        let mut iov = Vec::with_capacity(parts.len());
        for MessagePart { memory, offset, len } in parts {
            if !Arc::ptr_eq(memory.context(), &self.core.worker.context) || memory.kind() != MemoryKind::Host {
                let detail = format!("{memory:?} is not host memory of the context of {:?}", self.core);
                return Err(UcxError::invalid(AM, detail));
            }
            let buffer = ptr::with_exposed_provenance_mut(memory.slice(AM, *offset, *len)?);
            iov.push(ucp_dt_iov_t { buffer, length: *len });
        }
        self.post(
            AM,
            token,
            None,
            |operation| {
                operation.header.extend_from_slice(header);
                operation.parts.extend(parts.iter().map(|part| Arc::clone(&part.memory)));
                operation.iov = iov;
            },
            |buffers, param| {
                param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE.0 | ucx_sys::UCP_OP_ATTR_FIELD_DATATYPE.0;
                param.memory_type = ucx_sys::UCS_MEMORY_TYPE_HOST;
                param.datatype = u64::from(ucx_sys::UCP_DATATYPE_IOV.0);
                let (iov, count) = buffers.iov;
                // SAFETY: the endpoint is open; header, list and memory are held by the operation until UCX is done.
                unsafe { self.start_am(ep, id, buffers, (iov.cast(), count), param) }
            },
        )
    }

    /// Hands a message to UCX: the header in `buffers`, and what `param` says that `data` is.
    ///
    /// # Safety
    /// `ep` is open; the header, and `data` with all that it points to, stay until UCX is done with the operation.
    unsafe fn start_am(
        &self,
        ep: ucp_ep_h,
        id: u16,
        buffers: &Buffers,
        data: (*const c_void, usize),
        param: &ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        let (header, header_length) = buffers.header;
        let api = self.core.api();
        // SAFETY: promised by the caller.
        unsafe { api.ucp_am_send_nbx(ep, u32::from(id), header.cast(), header_length, data.0, data.1, param) }
    }

    fn check_am(&self, header: &[u8]) -> Result<ucp_ep_h, UcxError> {
        let limit = self.core.worker.max_header;
        if header.len() > limit {
            let detail = format!("the header has {} bytes, and this worker sends at most {limit}", header.len());
            return Err(UcxError::new(AM, Status::EXCEEDS_LIMIT, detail));
        }
        self.core.open_handle(AM)
    }

    /// Completes when everything posted on this endpoint before is complete at the peer too.
    ///
    /// # Errors
    /// [`Status::NOT_CONNECTED`] or the endpoint's failure; UCX's status. An error returned here has no
    /// completion.
    pub fn flush(&self, token: u64) -> Result<Posted, UcxError> {
        const OP: &str = "ucp_ep_flush_nbx";
        let ep = self.core.open_handle(OP)?;
        self.post(
            OP,
            token,
            None,
            |_| {},
            |_, param| {
                // SAFETY: the endpoint is open.
                unsafe { self.core.api().ucp_ep_flush_nbx(ep, param) }
            },
        )
    }

    fn post(
        &self,
        op: &'static str,
        token: u64,
        rkey: Option<Rc<Rkey>>,
        fill: impl FnOnce(&mut PostedOperation<OperationOwner>),
        start: impl FnOnce(&Buffers, &mut ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Result<Posted, UcxError> {
        let posted = self.core.worker.operations.post(
            Purpose::User { op, token },
            |operation| {
                operation.owner = Some(OperationOwner { endpoint: Rc::clone(&self.core), rkey });
                fill(operation);
            },
            start,
        );
        if posted == Ok(Posted::Pending) {
            self.core.in_flight.set(self.core.in_flight.get() + 1);
        }
        posted.map_err(|status| UcxError::new(op, status, format!("{:?}", self.core)))
    }

    /// The transports and devices in use, for example `tcp/lo, cma/memory`. UCX connects at the first
    /// operations, so right after [`connect`](super::Worker::connect) this may tell less than later.
    pub fn describe(&self) -> String {
        const MOST: usize = 64;
        let Ok(handle) = self.core.open_handle("ucp_ep_query") else { return "closed".to_owned() };
        if self.core.api().ucp_ep_query.is_err() {
            return "unknown (this UCX cannot tell)".to_owned();
        }
        let mut entries = [ucp_transport_entry_t { transport_name: ptr::null(), device_name: ptr::null() }; MOST];
        // SAFETY: all-zero is valid for this C structure of integers and pointers.
        let mut attr: ucp_ep_attr_t = unsafe { MaybeUninit::zeroed().assume_init() };
        attr.field_mask = u64::from(ucx_sys::UCP_EP_ATTR_FIELD_TRANSPORTS.0);
        attr.transports.entries = entries.as_mut_ptr();
        attr.transports.num_entries = MOST as u32;
        attr.transports.entry_size = size_of::<ucp_transport_entry_t>();
        // SAFETY: the endpoint is open, and UCX writes at most `num_entries` entries of `entry_size` bytes.
        let status = Status::from_raw(unsafe { self.core.api().ucp_ep_query(handle, &mut attr) });
        if !status.is_ok() {
            return format!("unknown ({status})");
        }
        let known = entries.iter().take(attr.transports.num_entries as usize);
        let mut lanes: Vec<String> = known
            // SAFETY: UCX set both to strings that live as long as the endpoint, which is open.
            .map(|entry| unsafe { format!("{}/{}", text(entry.transport_name), text(entry.device_name)) })
            .collect();
        lanes.dedup();
        lanes.join(", ")
    }

    /// Starts closing. Without `force` everything posted finishes first; with it, everything ends now, with
    /// errors, as for a failed peer always.
    pub fn close(self, force: bool) -> CloseRequest {
        self.core.start_close(force);
        CloseRequest { core: Rc::clone(&self.core) }
    }
}

/// Explains a failed `ucp_ep_create`.
fn cannot_be_made(core: &EndpointCore, status: Status) -> String {
    match status {
        Status::UNREACHABLE => format!(
            "{core:?} could not be made: no transport of this context (TLS and NET_DEVICES, as configured) reaches the peer's \
             address"
        ),
        // Shared memory and CMA look after the peer's process.
        Status::ENDPOINT_TIMEOUT => {
            format!(
                "{core:?} could not be made: the peer's process on this host has ended, or its host does not answer"
            )
        }
        _ => format!("{core:?} could not be made"),
    }
}

/// # Safety
/// `pointer` is null or a C string that is alive during the call.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "?".to_owned();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.core.start_close(true);
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(out)
    }
}

/// A closing endpoint. It goes on without this; [`Worker::progress`](super::Worker::progress) drives it.
pub struct CloseRequest {
    core: Rc<EndpointCore>,
}

impl CloseRequest {
    /// True when UCX has released the endpoint and every operation has delivered its completion. From then on UCX
    /// touches no memory because of this endpoint.
    pub fn is_finished(&self) -> bool {
        self.core.state.get() == EndpointState::Closed && self.core.in_flight.get() == 0
    }
}

impl fmt::Debug for CloseRequest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "closing {:?}", self.core)
    }
}
