//! The resources that a context found on this machine, and the variables that have no effect.

use std::env;

use super::context::{Context, alike};
use super::library::{self, Library};
use super::print::printed;

/// A transport over a device that a context may use.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Resource {
    /// UCX's name of the transport, such as `tcp`, `cma` or `rc_mlx5`.
    pub transport: String,
    /// The device, such as `eth0`, `memory` or `mlx5_0:1`.
    pub device: String,
}

/// A variable `UCX_*` of the environment that the UCX in use does not know.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UnknownVariable {
    /// Its name.
    pub name: String,
    /// Names that differ from it by a slip, at most three.
    pub similar: Vec<String>,
}

/// Beginnings of the names of UCX's transports that stay within a host, those for devices' memory included.
const WITHIN_HOST: [&str; 11] =
    ["self", "posix", "sysv", "xpmem", "knem", "cma", "cuda", "gdr_copy", "rocm", "ze_", "gaudi"];
/// Transports over memory that the processes of a host share, in files of /dev/shm or in segments of System V.
const SHARED_MEMORY: [&str; 2] = ["posix", "sysv"];

impl Resource {
    /// True if its device is one of a network, a loopback included.
    pub fn is_network(&self) -> bool {
        !WITHIN_HOST.iter().any(|start| self.transport.starts_with(start))
    }

    /// True if every worker takes shared memory for it.
    pub fn is_shared_memory(&self) -> bool {
        SHARED_MEMORY.contains(&self.transport.as_str())
    }
}

impl Context {
    /// The transports and devices of this context. Its settings and the environment choose among those of the
    /// machine. Empty where UCX cannot tell.
    pub fn resources(&self) -> Vec<Resource> {
        type PrintInfo = unsafe extern "C" fn(ucx_sys::ucp_context_h, *mut libc::FILE);
        let Some(print) = self.library().api().symbol(b"ucp_context_print_info\0") else { return Vec::new() };
        // SAFETY: this is the function's type in ucp/api/ucp.h; `symbol` found it non-null.
        let print = unsafe { std::mem::transmute::<*mut std::os::raw::c_void, PrintInfo>(print) };
        // SAFETY: the context is alive and the stream open during the call, which only reads the context.
        let text = printed(|stream| unsafe { print(self.handle(), stream) });
        let mut found: Vec<Resource> = text.lines().filter_map(resource).collect();
        found.sort();
        found.dedup();
        found
    }

    /// Variables `UCX_*` of the environment that the UCX in use does not know, sorted. Settings of a transport are known
    /// once its module is loaded, which making a context does where the module's own libraries are there.
    pub fn unknown_variables(&self) -> Vec<UnknownVariable> {
        let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        unknown_variables(self.library(), names)
    }
}

fn unknown_variables(library: &Library, names: impl Iterator<Item = String>) -> Vec<UnknownVariable> {
    let known = library::known_settings(library);
    if known.is_empty() {
        return Vec::new();
    }
    let mut unknown: Vec<UnknownVariable> = names
        .filter_map(|name| {
            let bare = name.strip_prefix("UCX_")?;
            if known.iter().any(|other| other == bare) {
                return None;
            }
            let similar = known.iter().filter(|other| alike(bare, other)).take(3);
            Some(UnknownVariable { similar: similar.map(|other| format!("UCX_{other}")).collect(), name })
        })
        .collect();
    unknown.sort();
    unknown
}

/// From a line such as `#      resource 2  :  md 1  dev 1  flags -- tcp/eth0`.
fn resource(line: &str) -> Option<Resource> {
    let line = line.trim_start_matches(['#', ' ']).strip_prefix("resource ")?;
    let (transport, device) = line.split_whitespace().last()?.split_once('/')?;
    Some(Resource { transport: transport.to_owned(), device: device.to_owned() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_from_what_ucx_prints() {
        let found = resource("#           resource 3  :  md 2  dev 1  flags -- rc_mlx5/mlx5_0:1");
        assert_eq!(found, Some(Resource { transport: "rc_mlx5".to_owned(), device: "mlx5_0:1".to_owned() }));
        assert_eq!(resource("#             md 3  :  component 3  posix"), None);
        assert_eq!(resource("# UCP context"), None);
        assert!(found.unwrap().is_network());
        let within = resource("#  resource 1  :  md 1  dev 1  flags -- posix/memory").unwrap();
        assert!(within.is_shared_memory() && !within.is_network());
    }
}
