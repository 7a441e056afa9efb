//! `kvf_ucx_*`: the UCX that this process uses, and what it finds on this machine.

use std::ffi::c_char;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::boundary::{slice, text};
use super::buffer::{fill, kvf_buffer};
use super::{decode, log};
use crate::agent::{AgentConfig, Probe};
use crate::error::Result;
use crate::mem::ucx_error;
use crate::settings::{Component, parse_config};
use crate::ucx::{Candidate, Fate, Library, LibraryInfo};

#[derive(Serialize)]
struct UcxInfo {
    path: String,
    version: String,
    source: String,
}

impl From<&LibraryInfo> for UcxInfo {
    fn from(info: &LibraryInfo) -> Self {
        let path = info.path.display().to_string();
        UcxInfo { path, version: info.version.clone(), source: info.source.to_string() }
    }
}

/// Opens the UCX that agents of this process use, and tells which it is. `*out` is a msgpack map of path, version and
/// source (how it was found). `ucx_lib` is the path of a libucp, or NULL with length 0 to have one found. A process
/// has one UCX: another path than the one in use is KVF_INVALID_ARGUMENT. Without a usable one it is KVF_UCX_MISSING,
/// and the text says where it was searched for and how to get one.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ucx_info(ucx_lib: *const c_char, ucx_lib_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_ucx_info, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let path = text(ucx_lib, ucx_lib_len, "ucx_lib")?;
            fill(out, || ucx_info((!path.is_empty()).then(|| Path::new(path))))
        }
    })
}

fn ucx_info(path: Option<&Path>) -> Result<Vec<u8>> {
    decode::encode("ucx info", &UcxInfo::from(Library::open(path).map_err(ucx_error)?.info()))
}

/// Tells the search for a UCX where a Python package kvferry-ucx or libucx lies. `path` is that of its libucp.so.0,
/// where only the host's own module path leads to it. The searches from now on try it after those of the same package
/// that they find by themselves. The last path for either package counts. Opens nothing.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ucx_hint(path: *const c_char, path_len: usize) -> i32 {
    boundary!(kvf_ucx_hint, {
        // SAFETY: the caller's promise for arrays.
        Library::hint(Path::new(unsafe { text(path, path_len, "path")? }));
        Ok(())
    })
}

#[derive(Serialize)]
struct CandidateMap {
    path: String,
    source: String,
    fate: &'static str,
    version: Option<String>,
    why: Option<String>,
}

impl From<Candidate> for CandidateMap {
    fn from(candidate: Candidate) -> Self {
        let (fate, version, why) = match candidate.fate {
            Fate::Chosen { version } => ("chosen", Some(version), None),
            Fate::Refused { version, why } => ("refused", version, Some(why)),
            Fate::NotTried => ("not_tried", None, None),
        };
        CandidateMap {
            path: candidate.path.display().to_string(),
            source: candidate.source.to_string(),
            fate,
            version,
            why,
        }
    }
}

#[derive(Serialize)]
struct Candidates {
    candidates: Vec<CandidateMap>,
}

/// Lists every libucp that the search for a UCX comes by, in its order. `*out` is a msgpack map with candidates, a
/// list of maps with path, source (how the search came by it), fate ("chosen", "refused" or "not_tried": the search
/// had ended), version (str or nil) and why (str or nil: the reason of a refusal). Opens the chosen one as
/// kvf_ucx_info does; that none is usable is no error here. `ucx_lib` as there. Where this process has opened a UCX
/// already, the answer is that of the search which found it.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ucx_candidates(ucx_lib: *const c_char, ucx_lib_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_ucx_candidates, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let path = text(ucx_lib, ucx_lib_len, "ucx_lib")?;
            fill(out, || {
                let found = Library::candidates((!path.is_empty()).then(|| Path::new(path)));
                decode::encode("candidates", &Candidates { candidates: found.into_iter().map(Into::into).collect() })
            })
        }
    })
}

#[derive(Serialize)]
struct ResourceMap {
    transport: String,
    device: String,
}

#[derive(Serialize)]
struct DeviceMap {
    name: String,
    addresses: Vec<String>,
    is_used: bool,
    repeats: bool,
    why: String,
}

#[derive(Serialize)]
struct UnknownMap {
    name: String,
    similar: Vec<String>,
}

#[derive(Serialize)]
struct ProbeMap {
    ucx: UcxInfo,
    resources: Vec<ResourceMap>,
    devices: Vec<DeviceMap>,
    moves_cuda: bool,
    unknown_variables: Vec<UnknownMap>,
    others: Vec<String>,
}

impl From<Probe> for ProbeMap {
    fn from(outlook: Probe) -> Self {
        let resources = outlook.resources.into_iter();
        let devices = outlook.devices.into_iter().map(|device| DeviceMap {
            name: device.name,
            addresses: device.addresses.iter().map(ToString::to_string).collect(),
            is_used: device.is_used,
            repeats: device.repeats,
            why: device.why,
        });
        let unknown = outlook.unknown_variables.into_iter();
        let others = outlook.others.into_iter();
        ProbeMap {
            ucx: UcxInfo::from(&outlook.ucx),
            resources: resources.map(|r| ResourceMap { transport: r.transport, device: r.device }).collect(),
            devices: devices.collect(),
            moves_cuda: outlook.moves_cuda,
            unknown_variables: unknown.map(|v| UnknownMap { name: v.name, similar: v.similar }).collect(),
            others: others.map(|path: PathBuf| path.display().to_string()).collect(),
        }
    }
}

/// Tells what an agent of `config` (as in kvf_agent_start) would use: a msgpack map with ucx (as of kvf_ucx_info),
/// resources (list of maps with transport and device, both in UCX's words), devices (list of maps with name, addresses (list
/// of str), is_used, repeats (whether other hosts may have the same addresses) and why: the network devices), moves_cuda (bool), unknown_variables (list of
/// maps with name and similar: variables UCX_* of the environment that this UCX does not know, and names that differ by a
/// slip) and others (paths of other libucp files that are loaded in this process). Opens UCX and makes and frees a context;
/// errors as of kvf_agent_start.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ucx_outlook(config: *const u8, config_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_ucx_outlook, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let config = slice(config, config_len, "config")?;
            let config: AgentConfig = parse_config(Component::Agent, config)?;
            log::start();
            fill(out, || decode::encode("an outlook", &ProbeMap::from(Probe::of(&config)?)))
        }
    })
}
