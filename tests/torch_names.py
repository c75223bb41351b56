"""Every private name of torch that the package touches, by owner: what to read when torch moves.

A text holds a function's parameters as far as they are passed: they have to be there in this
order, and every other one has to have a default. None: an attribute, a class, or a function written
in C++. `tests/test_torch_names.py` compares both sides: the package's source, and this torch.
"""

NAMES: dict[str, dict[str, str | None]] = {
    "torch": {
        "_chunk_cat": None,
        "_foreach_copy_": None,
    },
    "torch.Tensor": {
        "_post_accumulate_grad_hooks": None,
        "_version": None,
    },
    "torch.UntypedStorage": {
        "_cdata": None,
    },
    "torch._C": {
        "DispatchKey": None,
        "_SetExcludeDispatchKeyGuard": None,
        "_current_graph_task_id": None,
        "_set_grad_enabled": None,
        "_storage_Use_Count": None,
        "_will_engine_execute_node": None,
    },
    "torch._C.DispatchKey": {
        "ADInplaceOrView": None,
        "Autograd": None,
        "AutogradFunctionality": None,
        "CompositeImplicitAutograd": None,
    },
    "torch._C._autograd": {
        "_get_current_graph_task_keep_graph": None,
    },
    "torch._C._distributed_c10d": {
        "AllgatherOptions": None,
    },
    "torch._C._dynamo.eval_frame": {
        "_FrameAction": None,
        "_FrameExecStrategy": None,
        "set_code_exec_strategy": None,
    },
    "torch._C._dynamo.eval_frame._FrameAction": {
        "DEFAULT": None,
        "RUN_ONLY": None,
    },
    "torch._decomp": {
        "decompositions": None,
    },
    "torch._decomp.decompositions": {
        "should_fold": "tensor1 tensor2 is_out",
        "upsample_compute_output_size": "input_size output_size scale_factors",
    },
    "torch._dynamo": {
        "lookup_backend": "compiler_fn",
    },
    "torch._dynamo.config": {
        "accumulated_recompile_limit": None,
        "ignore_logging_functions": None,
        "recompile_limit": None,
    },
    "torch._dynamo.backends.common": {
        "aot_autograd": "kwargs",
    },
    "torch._dynamo.convert_frame": {
        "CatchErrorsWrapper": None,
        "ConvertFrame": None,
        "input_codes": None,
    },
    "torch._dynamo.convert_frame.ConvertFrame": {
        "_inner_convert": None,
    },
    "torch._dynamo.eval_frame": {
        "OptimizedModule": None,
        "_TorchDynamoContext": None,
        "skip_code": "code",
    },
    "torch._dynamo.eval_frame.OptimizedModule": {
        "_orig_mod": None,
    },
    "torch._dynamo.eval_frame._TorchDynamoContext": {
        "_dynamic": None,
        "_torchdynamo_inline": None,
        "_torchdynamo_orig_callable": None,
    },
    "torch._dynamo.exc": {
        "InternalTorchDynamoError": None,
        "RestartAnalysis": None,
        "SkipFrame": None,
        "TorchDynamoException": None,
        "TorchRuntimeError": None,
        "Unsupported": None,
    },
    "torch._dynamo.external_utils": {
        "wrap_inline": "fn",
    },
    "torch._dynamo.guards": {
        "install_guard": "guards skip",
    },
    "torch._dynamo.output_graph": {
        "GraphCompileReason": "reason user_stack",
    },
    "torch._dynamo.symbolic_convert": {
        "InstructionTranslator": None,
    },
    "torch._dynamo.symbolic_convert.InstructionTranslator": {
        "current_tx": "",
    },
    "torch._dynamo.types": {
        "ConvertFrameReturn": None,
    },
    "torch._dynamo.utils": {
        "_disable_side_effect_safety_checks_for_current_subtracer": "fn args kwargs",
    },
    "torch._functorch._aot_autograd.descriptors": {
        "InputMutationAOTOutput": None,
        "PlainAOTInput": None,
        "PlainAOTOutput": None,
        "SubclassGetAttrAOTInput": None,
        "SubclassGetAttrAOTOutput": None,
        "TangentAOTInput": None,
    },
    "torch._functorch.config": {
        "patch": None,
    },
    "torch._functorch.partitioners": {
        "default_partition": "joint_module _joint_inputs num_fwd_outputs",
        "min_cut_rematerialization_partition": "joint_module _joint_inputs num_fwd_outputs",
    },
    "torch._guards": {
        "TracingContext": None,
        "detect_fake_mode": "inputs",
        "tracing": "context",
    },
    "torch._inductor": {
        "config": None,
        "list_mode_options": "mode dynamic",
        "list_options": "",
    },
    "torch._inductor.async_compile": {
        "AsyncCompile": None,
    },
    "torch._inductor.async_compile.AsyncCompile": {
        "cpp_pybinding": "self argtypes source_code",
        "wait": "self scope",
    },
    "torch._inductor.codecache": {
        "CppPythonBindingsCodeCache": None,
    },
    "torch._inductor.codecache.CppPythonBindingsCodeCache": {
        "load_pybinding": "args kwargs",
        "suffix_template": None,
    },
    "torch._inductor.compile_fx": {
        "_recursive_joint_graph_passes": "gm skip_invoke_subgraph input_device",
        "compile_fx": "model_ example_inputs_ config_patches",
        "compile_fx_inner": "gm example_inputs kwargs",
    },
    "torch._inductor.cpp_builder": {
        "CppBuilder": None,
        "CppTorchDeviceOptions": None,
        "get_compiler_version_info": "compiler",
        "get_cpp_compiler": "",
    },
    "torch._inductor.cpu_vec_isa": {
        "pick_vec_isa": "",
        "supported_vec_isa_list": None,
        "valid_vec_isa_list": "",
    },
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list": {
        "cache_clear": None,
    },
    "torch._inductor.exc": {
        "CppCompileError": None,
    },
    "torch._inductor.config": {
        "cpp": None,
        "cpp_cache_precompile_headers": None,
        "fallback_random": None,
    },
    "torch._inductor.decomposition": {
        "select_decomp_table": "",
    },
    "torch._inductor.runtime.cache_dir_utils": {
        "cache_dir": "",
    },
    "torch._inductor.virtualized": {
        "V": None,
    },
    "torch._inductor.virtualized.V": {
        "set_fake_mode": None,
    },
    "torch._logging._internal": {
        "trace_structured": "name metadata_fn payload_fn",
    },
    "torch._ops": {
        "HigherOrderOperator": None,
    },
    "torch._ops.OperatorBase": {"_dispatch_cache": None},
    "torch._ops.OpOverload": {"_schema": None},
    "torch._prims_common": {
        "make_contiguous_strides_for": "shape",
    },
    "torch._subclasses.fake_tensor": {
        "DynamicOutputShapeException": None,
        "FakeTensor": None,
        "FakeTensorMode": None,
    },
    "torch.amp.autocast_mode": {
        "_exit_autocast": "mode",
    },
    "torch.autograd": {
        "_profiler_enabled": None,
    },
    "torch.autograd.Variable": {
        "_execution_engine": None,
    },
    "torch.autograd.Function._backward_cls": {
        "_forward_cls": None,
    },
    "torch.distributed.ProcessGroup": {
        "_get_backend": None,
    },
    "torch.distributed.Work": {
        "_get_op_type": None,
    },
    "torch.distributed._composable.contract": {
        "REGISTRY_KEY": None,
        "STATE_KEY": None,
        "_get_registry": "module",
    },
    "torch.distributed._composable_state": {
        "_module_state_mapping": None,
    },
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": {
        "_CHECKPOINT_PREFIX": None,
        "checkpoint_wrapper": None,
    },
    "torch.distributed.distributed_c10d": {
        "_get_default_store": "",
        "_resolve_process_group": None,
    },
    "torch.distributed.fsdp.FSDPModule": {
        "_get_fsdp_state": "self",
    },
    "torch.distributed.fsdp.MixedPrecision": {
        "_module_classes_to_ignore": None,
    },
    "torch.distributed.fsdp.ShardingStrategy": {
        "_HYBRID_SHARD_ZERO2": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": {
        "DefaultAllGather": None,
        "DefaultReduceScatter": None,
        "_get_gradient_divide_factors": (
            "reduce_scatter_group all_reduce_group reduce_dtype "
            "device_type factor force_sum_reduction_for_comms"
        ),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.AllGatherResult": {
        "all_gather_work": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "DDPMeshInfo": None,
        "FSDPMeshInfo": None,
        "TrainingState": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo": {
        "mesh": None,
        "replicate_mesh_dim": None,
        "shard_mesh_dim": None,
        "shard_mesh_size": None,
        "shard_process_group": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState": {
        "FORWARD": None,
        "PRE_BACKWARD": None,
        "IDLE": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param": {
        "FSDPParam": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        "_contiguous_orig_stride": None,
        "_extensions_data": None,
        "_get_grad_inner_tensor": "self grad",
        "_module_info": None,
        "_orig_size": None,
        "_param_fqn": None,
        "_setattr_on_modules": "self param",
        "_sharded_local_tensor": None,
        "_sharded_param_data": None,
        "_sharding_spec": None,
        "_tp_spec": None,
        "_unsharded_dtensor_spec": None,
        "_unsharded_param": None,
        "all_gather_inputs": None,
        "alloc_all_gather_outputs": "self",
        "all_gather_outputs": None,
        "contiguous_sharded_stride": None,
        "free_unsharded_param": "self",
        "fsdp_placement": None,
        "init_all_gather_outputs": (
            "self all_gather_input_numels all_gather_input_dtypes world_size device"
        ),
        "init_unsharded_param": "self",
        "is_dtensor": None,
        "keep_unsharded_storage": None,
        "may_reduce_grad_outside_dp": None,
        "orig_dtype": None,
        "padded_sharded_param_size": None,
        "param_dtype": None,
        "reduce_dtype": None,
        "sharded_grad_dtype": None,
        "sharded_param": None,
        "sharded_size": None,
        "unsharded_accumulated_grad": None,
        "unsharded_grad_dtype": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.ParamModuleInfo": {
        "param_name": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": {
        "FSDPCommContext": None,
        "FSDPParamGroup": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPCommContext": {
        "all_gather_state": None,
        "post_forward_order": None,
        "reduce_scatter_max_input_buffers": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "_all_gather_comm": None,
        "_all_gather_result": None,
        "_all_reduce_hook": None,
        "_all_reduce_hook_stream": None,
        "_all_reduce_process_group": None,
        "_get_partial_reduce_grad": None,
        "_get_reduce_dtype": None,
        "_module_fqn": None,
        "_partial_reduce_output": None,
        "_post_backward_pending": None,
        "_post_forward_indices": None,
        "_prepare_partial_reduce_output": None,
        "_reduce_dtype": None,
        "_reduce_scatter_comm": None,
        "_reduce_scatter_param_indices": None,
        "_reduce_scatter_process_group": None,
        "_reshard_after_forward": None,
        "_set_separate_reduce_scatter_group": "self enable new_groups",
        "_to_sharded": "self",
        "_training_state": None,
        "_use_post_forward_mesh": None,
        "all_reduce_grads": None,
        "device": None,
        "device_handle": None,
        "force_sum_reduction_for_comms": None,
        "fsdp_params": None,
        "gradient_divide_factor": None,
        "is_sharded": None,
        "is_unsharded": None,
        "mesh_info": None,
        "offload_policy": None,
        "post_forward_mesh_info": None,
        "reduce_grads": None,
        "reduce_scatter_unused_params": None,
        "reshard": "self",
        "reshard_after_backward": None,
        "unshard": "self async_op",
        "unshard_in_backward": None,
        "wait_for_unshard": "self",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state": {
        "FSDPState": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_auto_reshard_after_forward": None,
        "_comm_ctx": None,
        "_device": None,
        "_fsdp_param_group": None,
        "_fsdp_param_groups": None,
        "_is_root": None,
        "_lazy_init": "self",
        "_modules": None,
        "_modules_to_run_forward": None,
        "_mp_policy": None,
        "_post_forward": "self module input output",
        "_post_forward_hook_handle": None,
        "_pre_forward": "self module args kwargs",
        "_pre_forward_hook_handle": None,
        "_reset_iter_state": "self",
        "_state_ctx": None,
        "_states_to_backward_prefetch": None,
        "_states_to_forward_prefetch": None,
        "_training_state": None,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext": {
        "all_states": None,
        "iter_forward_root": None,
        "post_backward_final_callback_queued": None,
        "post_optim_event": None,
    },
    "torch.distributed.fsdp.wrap._Policy": {
        "_run_policy": "self root_module ignored_modules root_kwargs",
    },
    "torch.distributed.pipelining.stage": {
        "_PipelineStageBase": None,
    },
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": None,
        "_spec": None,
    },
    "torch.distributed.tensor.debug": {
        "_clear_sharding_prop_cache": "",
    },
    "torch.distributed.utils": {},
    "torch.fx.Node": {
        "_rename": "self candidate",
    },
    "torch.fx._lazy_graph_module": {
        "_use_lazy_graph_module": "should_use",
    },
    "torch.fx.graph": {
        "_BoxedCodeGen": None,
    },
    "torch.nn.Module": {
        "_backward_hooks": None,
        "_backward_pre_hooks": None,
        "_buffers": None,
        "_call_impl": "self args kwargs",
        "_compiled_call_impl": None,
        "_forward_hooks": None,
        "_forward_pre_hooks": None,
    },
    "torch.nn.Parameter": {
        "_is_param": None,
    },
    "torch.nn.RNNBase": {
        "_flat_weights_names": None,
    },
    "torch.ops._c10d_functional": {},
    "torch.ops.aten": {
        "_fused_rms_norm": None,
        "_fused_rms_norm_backward": None,
        "_grouped_mm": None,
        "_local_scalar_dense": None,
        "_log_softmax": None,
        "_log_softmax_backward_data": None,
        "_scaled_grouped_mm": None,
        "_scaled_dot_product_flash_attention": None,
        "_scaled_dot_product_flash_attention_backward": None,
        "_scaled_dot_product_flash_attention_for_cpu": None,
        "_scaled_dot_product_flash_attention_for_cpu_backward": None,
        "_to_copy": None,
        "_unsafe_view": None,
    },
    "torch.testing._internal.distributed.fake_pg": {
        "FakeStore": None,
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": None,
        "_disable_current_modes": None,
        "_get_current_dispatch_mode_stack": "",
        "is_traceable_wrapper_subclass": "t",
    },
    "torch.utils._pytree": {
        "tree_leaves": "tree is_leaf",
        "tree_map": "func tree rests is_leaf",
        "tree_map_only": "type_or_types_or_pred func tree is_leaf",
    },
    "torch.utils.checkpoint": {
        "_CachingTorchDispatchMode": None,
    },
}

# Names that came later than torch 2.11, and names that are gone again.
SINCE: dict[tuple[int, int], set[str]] = {
    (2, 12): {"_fsdp_param_groups", "_unsharded_dtensor_spec"},
    (2, 13): {
        "_reset_iter_state",
        "_set_separate_reduce_scatter_group",
        "reduce_scatter_max_input_buffers",
        "reduce_scatter_unused_params",
    },
    (2, 15): {
        "_get_partial_reduce_grad",
        "_get_reduce_dtype",
        "_post_backward_pending",
        "_prepare_partial_reduce_output",
        "_reduce_scatter_param_indices",
        "keep_unsharded_storage",
        "may_reduce_grad_outside_dp",
        "sharded_grad_dtype",
        "unsharded_grad_dtype",
    },
}
UNTIL: dict[tuple[int, int], set[str]] = {(2, 11): {"_tp_spec"}}

# Attributes that instances get from outside, of owners that no import reaches, or of torch itself.
ELSEWHERE = {
    "_C",
    "_member_map_",
    "_member_names_",
    "_name_",
    "_value2member_map_",
    "_value_",
    "_SubParsersAction",
    "_autograd",
    "_boxed_call",
    "_current_frames",
    "_dynamo",
    "_functorch",
    "_guards",
    "_inductor",
    "_pytree",
    "_timeout",
    "_torchdynamo_orig_backend",
}
