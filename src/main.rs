//! Parse, run, and end with the code the contract gives to what happened.

use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = outboxd::cli::parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    // The only provider there is; that another is in place already cannot happen and would do no harm.
    let _ = rustls::crypto::ring::default_provider().install_default();
    #[cfg(feature = "failpoints")]
    let _asked_for = outboxd::failpoints::begin();
    match outboxd::cli::execute(cli) {
        Ok(code) => ExitCode::from(code as u8),
        Err(halt) => {
            eprintln!("outboxd: {halt}");
            ExitCode::from(halt.code as u8)
        }
    }
}
