//! Launches that are recorded once and replayed, and their times on the device.

use cudarc::driver::{
    CudaGraph,
    sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode},
};

use crate::{
    device::{Device, failed},
    error::AccelError,
};

type Launches<'a> = Box<dyn FnMut() -> Result<(), AccelError> + 'a>;

/// Recorded launches.
pub struct Graph<'a> {
    graph: CudaGraph,
    /// The recorded closure: it borrows or owns the memory whose addresses the graph holds.
    _launches: Launches<'a>,
}

/// Times of replays, in microseconds by the device's clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The median; the larger middle value of an even number.
    pub median: f32,
    /// The fastest.
    pub least: f32,
}

impl Times {
    /// The statistics of one or more measured times.
    fn of(mut times: Vec<f32>) -> Self {
        times.sort_by(f32::total_cmp);
        let at = |i: usize| times.get(i).copied().unwrap_or(f32::NAN);
        Self { median: at(times.len() / 2), least: at(0) }
    }

    /// The times of one of `count` equal parts.
    pub fn each(self, count: usize) -> Self {
        Self { median: self.median / count as f32, least: self.least / count as f32 }
    }
}

/// Replays that are timed by default.
pub const REPLAYS: usize = 7;
/// Replays before the measured ones, at least, and their microseconds. A device that idled while the host made weights
/// takes some time to raise its clocks, and lowers them again under long multiplication.
const WARM_UP: (usize, f32) = (2, 3000.0);

impl Device {
    /// Replays recorded launches: some to warm up, then `replays` (at least 1), each timed.
    ///
    /// # Errors
    /// [`AccelError::Driver`].
    pub fn time(&self, graph: &Graph<'_>, replays: usize) -> Result<Times, AccelError> {
        let (mut count, mut warm) = (0, 0.0);
        // An empty graph takes no time at all.
        while count < WARM_UP.0 || (warm < WARM_UP.1 && count < 1000) {
            warm += self.microseconds(|| graph.replay())?;
            count += 1;
        }
        let times = (0..replays.max(1)).map(|_| self.microseconds(|| graph.replay()));
        Ok(Times::of(times.collect::<Result<_, _>>()?))
    }

    /// Records the launches of `launches` instead of running them. They must be on this device,
    /// allocate nothing, and copy nothing to the host.
    ///
    /// # Errors
    /// The error of `launches`; [`AccelError::Driver`] for launches that cannot be recorded.
    pub fn record<'a>(
        &self,
        launches: impl FnMut() -> Result<(), AccelError> + 'a,
    ) -> Result<Graph<'a>, AccelError> {
        let mut launches: Launches<'a> = Box::new(launches);
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream().begin_capture(mode).map_err(failed("cuStreamBeginCapture"))?;
        let launched = launches();
        // Always end the capture, so that the stream is usable again.
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.stream().end_capture(flags);
        launched?;
        match graph.map_err(failed("cuStreamEndCapture"))? {
            Some(graph) => Ok(Graph { graph, _launches: launches }),
            None => Err(AccelError::Driver {
                call: "cuStreamEndCapture",
                reason: "nothing was recorded".into(),
            }),
        }
    }

    /// Microseconds that the device takes for the launches of `launches`, without the wait before
    /// the first.
    ///
    /// # Errors
    /// The error of `launches`; [`AccelError::Driver`].
    pub fn microseconds(
        &self,
        launches: impl FnOnce() -> Result<(), AccelError>,
    ) -> Result<f32, AccelError> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let event = || self.stream().record_event(flags).map_err(failed("cuEventRecord"));
        let start = event()?;
        launches()?;
        let end = event()?;
        end.synchronize().map_err(failed("cuEventSynchronize"))?;
        start.elapsed_ms(&end).map(|ms| ms * 1000.0).map_err(failed("cuEventElapsedTime"))
    }
}

/// Replays of ranks that wait for each other: a graph on each device, all at once. The time of a replay is that of
/// the device that starts last, which waits for no other one to start.
///
/// # Errors
/// [`AccelError::Driver`].
pub fn time_together(
    devices: &[&Device],
    graphs: &[Graph<'_>],
    replays: usize,
) -> Result<Times, AccelError> {
    let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
    let event =
        |device: &Device| device.stream().record_event(flags).map_err(failed("cuEventRecord"));
    let replay = || -> Result<f32, AccelError> {
        devices.iter().try_for_each(|device| device.synchronize())?;
        let mut events = Vec::new();
        for (device, graph) in devices.iter().zip(graphs) {
            let start = event(device)?;
            graph.replay()?;
            events.push((start, event(device)?));
        }
        let mut least = f32::INFINITY;
        for (start, end) in &events {
            end.synchronize().map_err(failed("cuEventSynchronize"))?;
            let elapsed = start.elapsed_ms(end).map_err(failed("cuEventElapsedTime"))?;
            least = least.min(elapsed * 1000.0);
        }
        Ok(least)
    };
    let (mut count, mut warm) = (0, 0.0);
    while count < WARM_UP.0 || (warm < WARM_UP.1 && count < 1000) {
        warm += replay()?;
        count += 1;
    }
    let times = (0..replays.max(1)).map(|_| replay());
    Ok(Times::of(times.collect::<Result<_, _>>()?))
}

impl Graph<'_> {
    /// Runs the recorded launches.
    ///
    /// # Errors
    /// [`AccelError::Driver`].
    pub fn replay(&self) -> Result<(), AccelError> {
        self.graph.launch().map_err(failed("cuGraphLaunch"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(Times::of(vec![3.0, 1.0, 2.0]), Times { median: 2.0, least: 1.0 });
        assert_eq!(Times::of(vec![4.0]).each(4), Times { median: 1.0, least: 1.0 });
    }
}
