//! Prints the counts of the house: `cargo run -p marlinspike-structure`.

use std::path::Path;

use marlinspike_structure::counts;
use marlinspike_structure::source::Workspace;

fn main() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the workspace");
    let workspace = Workspace::read(root, &["tools/structure", "integrations/python"])?;
    print!("{}", counts::table(root, &workspace)?);
    Ok(())
}
