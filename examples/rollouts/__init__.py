"""The main job: real rollouts on a real bug, in container sandboxes, through the SDK. Run it as `python -m examples.rollouts`."""
