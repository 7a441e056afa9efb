//! Generates the bindings from the headers of the installed UCX.
//!
//! Nothing is linked: libucp is opened at run time. The build needs only UCX's headers, libclang and a
//! C compiler (for the location of the C library's headers), each found as `find.rs` tells.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

#[path = "build/find.rs"]
mod find;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build/find.rs");
    println!("cargo:rerun-if-changed=wrapper.h");
    for name in find::VARIABLES {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if let Err(message) = generate() {
        eprintln!("ucx-sys: {message}");
        exit(1);
    }
}

fn generate() -> Result<(), String> {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set; build with cargo")?);
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set; build with cargo")?);
    let packages = find::PythonPackages::look(&manifest_dir);
    let headers = find::ucx_headers(&packages)?;
    let libclang = find::libclang(&packages)?;
    if let Some(folder) = libclang {
        // SAFETY: a build script has one thread here, so nothing reads the environment meanwhile.
        unsafe { env::set_var("LIBCLANG_PATH", folder) };
    }
    println!("cargo:rerun-if-changed={}", headers.join("ucp/api/ucp_version.h").display());
    find::check_version(&headers)?;

    let mut builder = bindgen::Builder::default()
        .header(path_text(&manifest_dir.join("wrapper.h"))?)
        .clang_arg(format!("-I{}", path_text(&headers)?));
    for folder in find::system_includes()? {
        builder = builder.clang_arg("-isystem").clang_arg(path_text(&folder)?);
    }
    builder
        .allowlist_function("ucp_.*")
        .allowlist_function("ucs_status_string")
        .allowlist_type("ucp_.*")
        .allowlist_type("ucs_status_t")
        .allowlist_type("ucs_memory_type.*")
        .allowlist_var("UCP_.*")
        .allowlist_var("UCS_(OK|INPROGRESS|ERR|MEMORY_TYPE|THREAD_MODE).*")
        // The parts that UCX itself has deprecated, and printers that want a FILE *.
        .blocklist_function(".*_(nb|nbr|nbi|print|print_info)$")
        .blocklist_function("ucp_(put|get|atomic_.*|request_test|tag_recv_request_test|worker_set_am_handler)$")
        .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: true })
        .prepend_enum_name(false)
        .generate_comments(false)
        .derive_debug(false)
        .derive_default(false)
        .layout_tests(true)
        .dynamic_library_name("Ucp")
        .dynamic_link_require_all(false)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .wrap_unsafe_ops(true)
        .formatter(bindgen::Formatter::None)
        .generate()
        .map_err(|error| format!("bindgen could not read the UCX headers in {}: {error}", headers.display()))?
        .write_to_file(out_dir.join("bindings.rs"))
        .map_err(|error| format!("could not write the bindings into {}: {error}", out_dir.display()))
}

fn path_text(path: &Path) -> Result<String, String> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("the path {} is not UTF-8; bindgen needs one that is", path.display()))
}
