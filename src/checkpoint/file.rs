//! A checkpoint in a file: written beside it, synced, and renamed over it, so that a crash leaves the old or the new one
//! whole.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nix::unistd::AccessFlags;

use super::{Checkpoint, CheckpointError};

#[derive(Clone, Debug)]
pub struct FileStore {
    path: PathBuf,
}

impl FileStore {
    pub fn new(path: PathBuf) -> Self {
        FileStore { path }
    }

    pub async fn load(&self, pipeline: &str) -> Result<Option<Checkpoint>, CheckpointError> {
        let path = self.path.clone();
        let read = blocking(move || match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        });
        let Some(json) = read.await.map_err(|error| self.refused("read", &error))? else { return Ok(None) };
        let checkpoint = Checkpoint::from_json(pipeline, &json, &self.path.display().to_string())?;
        if checkpoint.pipeline != pipeline {
            let (path, other) = (self.path.display(), &checkpoint.pipeline);
            return Err(CheckpointError::Refused {
                what: format!("{path} holds the checkpoint of pipeline `{other}`, not of `{pipeline}`"),
                remedy: "give each pipeline a file of its own: --checkpoint file:PATH".to_owned(),
            });
        }
        Ok(Some(checkpoint))
    }

    /// Looks whether it could be written.
    pub async fn check_writable(&self) -> Result<(), CheckpointError> {
        let path = self.path.clone();
        let writable = blocking(move || nix::unistd::access(folder(&path), AccessFlags::W_OK).map_err(io::Error::from));
        writable.await.map_err(|error| self.refused("written", &error))
    }

    pub async fn save(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let (path, json) = (self.path.clone(), checkpoint.to_json());
        blocking(move || replace(&path, &json)).await.map_err(|error| self.refused("written", &error))
    }

    fn refused(&self, done: &str, error: &io::Error) -> CheckpointError {
        CheckpointError::Refused {
            what: format!("the checkpoint {} cannot be {done}: {error}", self.path.display()),
            remedy: "make the file and its folder readable and writable for outboxd".to_owned(),
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = folder(path);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = folder.join(name);
    let mut file = File::create(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    // The new name must outlive a crash of the machine as well.
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::SnapshotState;
    use super::*;

    fn checkpoint(position: &str) -> Checkpoint {
        Checkpoint {
            format: super::super::FORMAT,
            pipeline: "orders".to_owned(),
            source: "mysql".to_owned(),
            server: "s".to_owned(),
            position: position.to_owned(),
            file: String::new(),
            snapshot: SnapshotState::None,
        }
    }

    #[tokio::test]
    async fn what_was_saved_last_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path().join("orders.json"));
        assert_eq!(store.load("orders").await.unwrap(), None);
        for position in ["binlog.000001:4", "binlog.000002:4"] {
            store.save(&checkpoint(position)).await.unwrap();
            assert_eq!(store.load("orders").await.unwrap(), Some(checkpoint(position)));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the file");
    }

    #[tokio::test]
    async fn another_pipelines_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path().join("orders.json"));
        store.save(&checkpoint("binlog.000001:4")).await.unwrap();
        assert!(store.load("billing").await.unwrap_err().to_string().contains("`orders`"));
    }
}
