//! A UCX context: transports, devices and memory registrations of one process.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{process, ptr};

use ucx_sys::{ucp_config_t, ucp_context_attr_t, ucp_context_h, ucp_params_t};

use super::candidate::OLDEST;
use super::library::{self, Library};
use super::memory_kind::MemoryTypes;
use super::print::printed;
use super::status::{Status, UcxError};

/// The configuration of a context. The environment's `UCX_*` variables hold where nothing is set here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextConfig {
    /// The transports to use, as in UCX_TLS: for example `tcp` or `posix,cma,tcp`.
    pub tls: Option<String>,
    /// Further settings as (name, value). Names are those of UCX's documentation, with or without the `UCX_` in
    /// front.
    pub settings: Vec<(String, String)>,
    /// As `settings`, but left out where this UCX does not know the name.
    pub if_known: Vec<(String, String)>,
    /// True if the context has messages only. Then there are no reads and writes of peers' memory, neither ours nor
    /// theirs. UCX then does not serve those of a peer that emulates them by messages of its own.
    pub messages_only: bool,
    /// Names the context in UCX's own logs and traces. May be empty; at most 31 bytes are kept.
    pub name: String,
}

/// A UCX context. May be used from several threads: it is made with `mt_workers_shared`, and a UCX that
/// was built without support for that is refused.
pub struct Context {
    library: &'static Library,
    handle: ucp_context_h,
    memory_types: MemoryTypes,
}

// SAFETY: the context is made with mt_workers_shared and was checked to have got thread mode MULTI, so UCX
// guards what threads share behind the handle: mapping, unmapping, packing, querying, creating workers.
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

/// Held while a context is made.
static MAKING: Mutex<()> = Mutex::new(());

/// Contexts that live, and the process that made the last of them. UCX has a thread for all contexts of a process, which a
/// fork does not copy: until the last context is gone, new ones in the other process wait for that thread for ever.
static LIVING: AtomicUsize = AtomicUsize::new(0);
static MAKER: AtomicU32 = AtomicU32::new(0);

/// Refuses contexts in a process that was forked from one which had some.
fn check_process() -> Result<(), UcxError> {
    let (maker, own) = (MAKER.load(Ordering::Relaxed), process::id());
    if LIVING.load(Ordering::Relaxed) == 0 || maker == own {
        return Ok(());
    }
    let detail = format!(
        "UCX runs in process {maker}, and its threads stayed there when process {own} was forked from it; start processes by \
         spawn and not by fork, or close every agent before a fork"
    );
    Err(UcxError::new("ucp_init", Status::UNSUPPORTED, detail))
}

impl Context {
    /// Makes a context, opening libucp if this process has not yet.
    ///
    /// # Errors
    /// [`Status::NO_LIBRARY`] without a usable libucp; [`Status::NO_ELEM`] naming a setting that UCX does not
    /// know; [`Status::INVALID_PARAM`] for a value that UCX refuses; [`Status::UNSUPPORTED`] in a process that was forked
    /// from one which has contexts; UCX's own status when it cannot make a context of the transports and devices asked for.
    pub fn new(config: &ContextConfig) -> Result<Arc<Self>, UcxError> {
        check_process()?;
        let library = Library::open(None)?;
        let settings = config.all_settings()?;
        // UCX's list of settings grows while it loads modules, which is when the first context is made.
        let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let name = c_string("context name", &config.name)?;
        // SAFETY: all-zero is valid for this C structure of integers, pointers and nullable functions.
        let mut params: ucp_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = u64::from(
            ucx_sys::UCP_PARAM_FIELD_FEATURES.0
                | ucx_sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED.0
                | ucx_sys::UCP_PARAM_FIELD_NAME.0,
        );
        let one_sided = if config.messages_only { 0 } else { ucx_sys::UCP_FEATURE_RMA.0 };
        params.features = u64::from(one_sided | ucx_sys::UCP_FEATURE_AM.0 | ucx_sys::UCP_FEATURE_WAKEUP.0);
        params.mt_workers_shared = 1;
        params.name = name.as_ptr();
        let mut handle = init(library, &params, &settings, &config.if_known)?;
        if library.info().number < SILENT {
            // UCX warns at each worker of settings of modules that it lacks. Which those are is known now.
            let known = library::known_settings(library);
            let if_known: Vec<_> = config.if_known.iter().filter(|(name, _)| known.contains(name)).cloned().collect();
            if !known.is_empty() && if_known.len() < config.if_known.len() {
                // SAFETY: nothing has been made of the context, and the handle is replaced.
                unsafe { library.api().ucp_cleanup(handle) };
                handle = init(library, &params, &settings, &if_known)?;
            }
        }
        MAKER.store(process::id(), Ordering::Relaxed);
        LIVING.fetch_add(1, Ordering::Relaxed);
        let mut context = Self { library, handle, memory_types: MemoryTypes(0) };
        // Only now: making the context loads the transports' modules, and their settings with them.
        check_known(library, &settings)?;
        context.memory_types = context.query()?;
        Ok(Arc::new(context))
    }

    /// The libucp in use.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// The kinds of memory that this context can move.
    pub fn memory_types(&self) -> MemoryTypes {
        self.memory_types
    }

    pub(super) fn handle(&self) -> ucp_context_h {
        self.handle
    }

    fn query(&self) -> Result<MemoryTypes, UcxError> {
        // SAFETY: all-zero is valid for this C structure of integers.
        let mut attr: ucp_context_attr_t = unsafe { MaybeUninit::zeroed().assume_init() };
        attr.field_mask = u64::from(ucx_sys::UCP_ATTR_FIELD_THREAD_MODE.0 | ucx_sys::UCP_ATTR_FIELD_MEMORY_TYPES.0);
        // SAFETY: the handle is alive, and UCX writes only the fields in the mask.
        let status = unsafe { self.library.api().ucp_context_query(self.handle, &mut attr) };
        Status::from_raw(status).check("ucp_context_query", String::new)?;
        if attr.thread_mode != ucx_sys::UCS_THREAD_MODE_MULTI {
            let detail = format!(
                "{} was built without support for threads; use one built with --enable-mt, as the wheel \
                 kvferry-ucx has it",
                self.library.info()
            );
            return Err(UcxError::new("ucp_init", Status::UNSUPPORTED, detail));
        }
        Ok(MemoryTypes(attr.memory_types))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory hold an Arc of the context, so none is left; the handle is not used again.
        unsafe { self.library.api().ucp_cleanup(self.handle) };
        LIVING.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Context").field("library", &self.library).field("memory_types", &self.memory_types).finish()
    }
}

impl ContextConfig {
    /// All settings as (name without the prefix, value), in order.
    fn all_settings(&self) -> Result<Vec<(String, String)>, UcxError> {
        let mut all = Vec::new();
        all.extend(self.tls.iter().map(|value| ("TLS".to_owned(), value.clone())));
        for (name, value) in &self.settings {
            let bare = name.strip_prefix("UCX_").unwrap_or(name);
            if bare.is_empty() {
                return Err(UcxError::invalid(
                    "configure UCX",
                    format!("a setting has no name (its value is {value:?})"),
                ));
            }
            all.push((bare.to_owned(), value.clone()));
        }
        Ok(all)
    }
}

/// The first UCX that is silent about settings that none of its modules has.
const SILENT: (u32, u32, u32) = (1, 22, 0);

/// UCX's context with `settings`, which it must know, and those of `if_known` that it knows before its modules are loaded.
fn init(
    library: &'static Library,
    params: &ucp_params_t,
    settings: &[(String, String)],
    if_known: &[(String, String)],
) -> Result<ucp_context_h, UcxError> {
    let ucx_config = UcxConfig::read(library)?;
    for (name, value) in settings {
        ucx_config.modify(name, value)?;
    }
    for (name, value) in if_known {
        match ucx_config.modify(name, value) {
            Err(error) if error.status == Status::NO_ELEM => {}
            done => done?,
        }
    }
    let mut handle = ptr::null_mut();
    // SAFETY: the configuration and the parameters live during the call, which copies them. The interface
    // version is the oldest accepted one, because no field newer than that is used.
    let status = unsafe { library.api().ucp_init_version(OLDEST.0, OLDEST.1, params, ucx_config.handle, &mut handle) };
    let status = Status::from_raw(status);
    if !status.is_ok() {
        check_known(library, settings)?;
    }
    status.check("ucp_init", || explain(settings))?;
    Ok(handle)
}

fn explain(settings: &[(String, String)]) -> String {
    let show = |name: &str| match settings.iter().find(|(other, _)| other == name) {
        Some((_, value)) => value.clone(),
        None => std::env::var(format!("UCX_{name}"))
            .map_or_else(|_| "UCX's default".to_owned(), |value| format!("{value} (the environment's UCX_{name})")),
    };
    format!(
        "with TLS={}, NET_DEVICES={}; `ucx_info -d` lists the transports and devices that this machine has",
        show("TLS"),
        show("NET_DEVICES")
    )
}

/// Refuses a setting that UCX does not know. Of some versions (1.22) UCX refuses it without naming it, of others
/// it only prints a warning.
fn check_known(library: &Library, settings: &[(String, String)]) -> Result<(), UcxError> {
    if settings.is_empty() {
        return Ok(());
    }
    let known = library::known_settings(library);
    if known.is_empty() {
        log::debug!("this UCX cannot list its settings; unknown ones are not refused");
        return Ok(());
    }
    match settings.iter().find(|(name, _)| !known.contains(name)) {
        Some((name, _)) => Err(unknown_setting(library, name, &known)),
        None => Ok(()),
    }
}

fn unknown_setting(library: &Library, name: &str, known: &[String]) -> UcxError {
    let similar: Vec<&str> = known.iter().map(String::as_str).filter(|other| alike(name, other)).take(3).collect();
    let hint = if similar.is_empty() {
        "`ucx_info -c` lists those that exist".to_owned()
    } else {
        format!("did you mean {}?", similar.join(" or "))
    };
    UcxError::new("configure UCX", Status::NO_ELEM, format!("{name:?} is not a setting of {}; {hint}", library.info()))
}

/// True when the names differ by a slip: one letter more, less or other, or in the case of letters.
pub(super) fn alike(wrong: &str, right: &str) -> bool {
    strsim::levenshtein(&wrong.to_ascii_uppercase(), right) <= 1
}

/// Returns UCX's value of a setting that belongs to no transport.
///
/// `name` has no prefix. The value comes from the environment, else from UCX's configuration files, else it is UCX's
/// default; `None` if this UCX cannot tell.
///
/// # Errors
/// [`Status::INVALID_PARAM`] for a variable that UCX refuses.
pub fn configured(library: &'static Library, name: &str) -> Result<Option<String>, UcxError> {
    type Print = unsafe extern "C" fn(*const ucp_config_t, *mut libc::FILE, *const c_char, u32);
    let Some(print) = library.api().symbol(b"ucp_config_print\0") else { return Ok(None) };
    // SAFETY: this is the function's type in ucp/api/ucp.h; `symbol` found it non-null.
    let print = unsafe { std::mem::transmute::<*mut c_void, Print>(print) };
    let config = UcxConfig::read(library)?;
    // SAFETY: the configuration is alive and the stream open during the call; no title is printed without its flag.
    let text = printed(|stream| unsafe {
        print(config.handle, stream, ptr::null(), ucx_sys::UCS_CONFIG_PRINT_CONFIG.0);
    });
    let value = |line: &str| line.strip_prefix("UCX_")?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
    Ok(text.lines().find_map(value))
}

/// UCX's own configuration object.
struct UcxConfig {
    library: &'static Library,
    handle: *mut ucp_config_t,
}

impl UcxConfig {
    /// The defaults, UCX's configuration files and the environment.
    fn read(library: &'static Library) -> Result<Self, UcxError> {
        let mut handle = ptr::null_mut();
        // SAFETY: null stands for no further prefix and no further file; the result goes into `handle`.
        let status = unsafe { library.api().ucp_config_read(ptr::null(), ptr::null(), &mut handle) };
        Status::from_raw(status)
            .check("ucp_config_read", || "is a UCX_* variable in the environment malformed?".to_owned())?;
        Ok(Self { library, handle })
    }

    fn modify(&self, name: &str, value: &str) -> Result<(), UcxError> {
        let c_name = c_string("setting name", name)?;
        let c_value = c_string("setting value", value)?;
        // SAFETY: the handle is alive and both strings live during the call, which copies them.
        let status = unsafe { self.library.api().ucp_config_modify(self.handle, c_name.as_ptr(), c_value.as_ptr()) };
        let status = Status::from_raw(status);
        if !status.is_ok() {
            let known = library::known_settings(self.library);
            if !known.is_empty() && !known.iter().any(|other| other == name) {
                return Err(unknown_setting(self.library, name, &known));
            }
        }
        status.check("configure UCX", || format!("UCX refused {value:?} for its setting {name:?}"))
    }
}

impl Drop for UcxConfig {
    fn drop(&mut self) {
        // SAFETY: read by ucp_config_read, released once.
        unsafe { self.library.api().ucp_config_release(self.handle) };
    }
}

pub(super) fn c_string(what: &'static str, text: &str) -> Result<CString, UcxError> {
    CString::new(text).map_err(|_| UcxError::invalid(what, format!("{text:?} holds a NUL byte")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_alike() {
        assert!(alike("TCP_TX_SEG_SIZ", "TCP_TX_SEG_SIZE"));
        assert!(alike("tcp_tx_seg_size", "TCP_TX_SEG_SIZE"));
        assert!(alike("TCP_TX_SEC_SIZE", "TCP_TX_SEG_SIZE"));
        assert!(alike("TLSS", "TLS"));
        assert!(!alike("TCP_RX_SEG_SIZ", "TCP_TX_SEG_SIZE"));
        assert!(!alike("NOTHING_LIKE_IT", "TCP_TX_SEG_SIZE"));
    }
}
