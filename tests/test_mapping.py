"""Tests mirror the source: every module has its test module."""

from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent
TESTS = Path(__file__).parent

# Vocabulary without behaviour of its own; shown by the tests of those who use it.
WITHOUT_OWN_TEST = {
    "__main__", "override", "runtime", "mesh/calls",
}  # fmt: skip
# Tested under another name, because pytest wants unique names or one file shows two modules.
SHOWN_IN = {
    "error_base": "test_errors.py",
    "progress": "test_map_progress.py",
    "rendezvous/world_watch": "rendezvous/test_coordinator.py",
    "interrupts": "test_interrupt_steps.py",
    "backends/posting": "backends/test_handles.py",
    "links/shared_mailbox": "links/test_inbox.py",
    "links/reading_role": "links/test_inbox.py",
    "links/frame_reader": "links/test_connection.py",
    "rpc/agent_functions": "rpc/test_agent.py",
    "rpc/agent_streams": "rpc/test_stream.py",
    "rpc/feed": "rpc/test_stream.py",
    "rpc/proxies": "rpc/test_remote_objects.py",
    "backends/returns": "backends/test_tcp_returns.py",
    "rpc/served_stream": "rpc/test_stream.py",
    "rpc/caller": "rpc/test_agent.py",
    "services/rpc_agent": "rpc/test_agent.py",
    "services/agent_pool": "services/test_task_map.py",
    "services/agent_queues": "services/test_queue.py",
    "services/queue_client": "services/test_queue.py",
    "services/queue_description": "services/test_queue.py",
    "services/queue_holds": "services/test_queue_state.py",
    "services/queue_items": "services/test_queue.py",
    "services/queue_order": "services/test_queue_state.py",
    "services/queue_owner": "services/test_queue.py",
    "services/queue_requests": "services/test_queue.py",
    "services/queue_settings": "services/test_queue.py",
    "services/queue_supply": "services/test_queue_state.py",
    "services/queue_users": "services/test_queue_faults.py",
    "services/group_completions": "services/test_group_calls.py",
    "services/group_gathering": "services/test_group_calls.py",
    "services/group_members": "services/test_group_faults.py",
    "services/group_result": "services/test_group_calls.py",
    "services/group_run": "services/test_group_calls.py",
    "services/chunks": "services/test_task_map.py",
    "services/task_pool": "services/test_task_map.py",
    "services/workers": "services/test_task_map.py",
    "task_outcome": "services/test_task_map.py",
    "launch/local_map": "launch/test_local_world.py",
    "transports/tcp_stream": "transports/test_sockets.py",
    "transports/unix_stream": "transports/test_sockets.py",
    "transports/pipe": "transports/test_memory_stream.py",
    # Not in a folder "torch", which would be found as the package where there is none.
    "torch/group": "torch_programs/test_group.py",
    "torch/group_operations": "torch_programs/test_group.py",
    "torch/torch_rendezvous": "torch_programs/test_torch_rendezvous.py",
    "torch/devices": "torch_programs/test_devices.py",
    "torch/rpc/api": "torch_programs/test_rpc_calls.py",
    "torch/rpc/torch_codec": "torch_programs/test_rpc_calls.py",
    "torch/rpc/termination": "torch_programs/test_rpc_shutdown.py",
    "torch/rpc/functions": "torch_programs/test_rpc_calls.py",
    "torch/rpc/options": "torch_programs/test_rpc_calls.py",
    "torch/rpc/call_results": "torch_programs/test_rpc_calls.py",
    "torch/rpc/session": "torch_programs/test_rpc_calls.py",
    "torch/rpc/object_requests": "torch_programs/test_rpc_objects.py",
    "torch/rpc/owned_objects": "torch_programs/test_rpc_objects.py",
    "torch/rpc/rref": "torch_programs/test_rpc_objects.py",
    "torch/rpc/verbs": "torch_programs/test_rpc_verbs.py",
    "torch/rpc/guards": "torch_programs/test_rpc_naming_rule.py",
    "torch/rpc/naming_rule": "torch_programs/test_rpc_naming_rule.py",
    "torch/rpc/bounds": "torch_programs/test_rpc_hostile_arguments.py",
    "torch/rpc/listed_functions": "torch_programs/test_rpc_hostile_arguments.py",
    "torch/rpc/remote_module": "torch_programs/test_rpc_remote_module.py",
    "torch/rpc/initialization": "torch_programs/test_rpc_installation.py",
    "torch/rpc/autograd": "torch_programs/test_rpc_autograd.py",
    "torch/rpc/autograd_contexts": "torch_programs/test_rpc_autograd.py",
    "torch/rpc/autograd_engine": "torch_programs/test_rpc_autograd.py",
    "torch/rpc/autograd_pass": "torch_programs/test_rpc_autograd.py",
    "torch/rpc/optimizer": "torch_programs/test_rpc_optimizer.py",
    "backends/arguments": "backends/test_base.py",
    "mesh/group_ranks": "backends/test_sub.py",
    "links/send_handle": "links/test_outbox.py",
    "links/borrower": "links/test_single_copy.py",
    "links/lender": "links/test_single_copy.py",
    "codec/value_reader": "codec/test_codec.py",
    "testing/conformance/basic_checks": "conformance/test_conformance.py",
    "testing/conformance/call_checks": "conformance/test_conformance.py",
    "testing/conformance/collective_checks": "conformance/test_conformance.py",
    "testing/conformance/group_checks": "conformance/test_conformance.py",
    "testing/conformance/message_checks": "conformance/test_conformance.py",
    "testing/conformance/nested_call_checks": "conformance/test_conformance.py",
    "testing/conformance/queue_checks": "conformance/test_conformance.py",
    "testing/conformance/group_call_checks": "conformance/test_conformance.py",
    "testing/conformance/role_checks": "conformance/test_conformance.py",
    "testing/conformance/stream_checks": "conformance/test_conformance.py",
    "testing/conformance/pool_checks": "conformance/test_conformance.py",
    "testing/conformance/tools": "conformance/test_conformance.py",
    "fork": "faults/test_f_ending.py",
    "observe/status": "conformance/test_conformance.py",
    "rendezvous/reports": "rendezvous/test_coordinator.py",
    "rendezvous/membership": "backends/test_control_plane.py",
    "collectives/operation": "collectives/test_sequence.py",
    "mesh/mesh": "backends/test_tcp_backend.py",
    "mesh/tcp_mesh": "backends/test_tcp_backend.py",
    "mesh/connections": "backends/test_tcp_backend.py",
    "mesh/message_port": "mesh/test_lookout.py",
    "mesh/tcp_connections": "backends/test_tcp_backend.py",
    "backends/tcp": "backends/test_tcp_backend.py",
    "launch/process": "launch/test_launcher_memory.py",
    "launch/job": "launch/test_run.py",
    "launch/run_options": "launch/test_run.py",
    "launch/output_streams": "launch/test_output.py",
    "backends/agreement": "backends/test_sub.py",
    "backends/simulated_network": "backends/test_simulated.py",
    "backends/simulated_mesh": "backends/test_simulated.py",
    "rpc/messages": "rpc/test_rpc_messages.py",
}


def test_every_module_has_its_tests():
    missing = []
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).with_suffix("")
        if path.name == "__init__.py" or str(module) in WITHOUT_OWN_TEST:
            continue
        usual = f"{module.parent}/test_{module.name}.py"
        if not (TESTS / SHOWN_IN.get(str(module), usual)).exists():
            missing.append(str(module))
    assert not missing


def test_what_is_shown_elsewhere_is_there():
    named = {*SHOWN_IN, *WITHOUT_OWN_TEST}
    assert not [module for module in sorted(named) if not (SOURCE / f"{module}.py").exists()]
