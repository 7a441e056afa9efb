//! `kvf_settings_*`: every key that can be configured.

use super::boundary::slice;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::settings;

/// The name of an operator's map in errors.
const PLACE: &str = "kv_connector_extra_config";

/// Describes every key of every configuration, with the value that it has in this process.
///
/// `given` is a msgpack map of what an operator sets, as in vLLM's kv_connector_extra_config, or NULL with length 0 for
/// nothing. It is checked: an unknown key or a wrong value is KVF_INVALID_ARGUMENT, and so is a wrong environment
/// variable.
///
/// `*out` is a msgpack map. settings: list of maps with key, parts (list of agent, worker, scheduler, listener and
/// aggregator: whose configuration the key is in), giver ("operator"; "program": set by the program that holds the engine;
/// "environment": set by the variable alone), type (in words), unit, default (nil where there is none, then otherwise
/// says in words what holds, or "required"), otherwise, value, source ("given", "environment" or "default"), variable
/// (the environment variable, or nil), former (the key's earlier name, if the value was given under it, or nil), is_retired
/// (the key has no effect) and help. unknown_variables: list of maps with name and nearest (or nil), the
/// environment variables called KVFERRY_* that nothing reads.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_settings_describe(given: *const u8, given_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_settings_describe, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let given = slice(given, given_len, "given")?;
            fill(out, || decode::encode("a description", &settings::describe(PLACE, given)?))
        }
    })
}
