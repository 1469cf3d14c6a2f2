//! Mistakes that readers of a format are known to make.

/// Name and description of a known mistake.
#[derive(Debug, Clone, Copy)]
pub struct MistakeName {
    /// Name in reports.
    pub id: &'static str,
    /// What happened.
    pub text: &'static str,
}
