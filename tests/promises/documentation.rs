//! The README names the test of each promise: no row may name one that does not exist.

use std::path::Path;

#[test]
fn every_promise_of_the_readme_names_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).expect("there is a README");
    let mut promises = 0;
    for line in readme.lines().filter(|line| line.starts_with('|')) {
        let quoted: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
        let Some(at) = quoted.iter().position(|word| word.ends_with(".rs")) else { continue };
        let file = root.join("tests/promises").join(quoted[at]);
        let source = std::fs::read_to_string(&file).unwrap_or_else(|_| panic!("{} is missing", file.display()));
        let name = quoted.get(at + 1).unwrap_or_else(|| panic!("no test is named in: {line}"));
        assert!(source.contains(&format!("fn {name}(")), "{} has no test `{name}`", file.display());
        promises += 1;
    }
    assert!(promises >= 15, "only {promises} promises were found");
}
