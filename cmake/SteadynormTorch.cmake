# SPDX-License-Identifier: Apache-2.0
# Finds PyTorch through Python and describes it as imported targets. Not find_package(Torch): that one rewrites the
# CUDA architectures and flags of the whole project. Sets STEADYNORM_WITH_TORCH, STEADYNORM_WITH_TORCH_CUDA,
# STEADYNORM_WITH_TORCH_PYTHON and STEADYNORM_TORCH_VERSION.
include_guard()

set(STEADYNORM_WITH_TORCH OFF)
set(STEADYNORM_WITH_TORCH_CUDA OFF)
set(STEADYNORM_WITH_TORCH_PYTHON OFF)
set(STEADYNORM_TORCH_SUMMARY "off")

function(steadynorm_no_torch reason)
  if(NOT STEADYNORM_TORCH STREQUAL "AUTO")
    message(FATAL_ERROR "STEADYNORM_TORCH=ON needs a Python with its headers and torch 2.11 or newer, got ${reason}; "
                        "choose the interpreter with -DPython_EXECUTABLE=")
  endif()
  set(STEADYNORM_TORCH_SUMMARY "off (${reason})" PARENT_SCOPE)
endfunction()

function(steadynorm_find_torch)
  find_package(Python 3.10 COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    steadynorm_no_torch("no Python")
    return(PROPAGATE STEADYNORM_TORCH_SUMMARY)
  endif()

  # Reads torch/version.py alone: importing torch takes seconds, and needs libraries that the build does not.
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/locate_torch.py
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(status)
    steadynorm_no_torch("no torch in ${Python_EXECUTABLE}")
    return(PROPAGATE STEADYNORM_TORCH_SUMMARY)
  endif()
  list(GET found 0 root)
  list(GET found 1 version)
  list(GET found 2 cuda)
  list(GET found 3 headers)
  if(version VERSION_LESS 2.11)
    steadynorm_no_torch("torch ${version}")
    return(PROPAGATE STEADYNORM_TORCH_SUMMARY)
  endif()
  if(NOT headers STREQUAL "none" AND NOT EXISTS ${headers}/Python.h)
    steadynorm_no_torch("no ${headers}/Python.h (Debian package python3-dev)")
    return(PROPAGATE STEADYNORM_TORCH_SUMMARY)
  endif()

  add_library(steadynorm_libtorch INTERFACE IMPORTED)
  target_include_directories(steadynorm_libtorch SYSTEM INTERFACE
    ${root}/include ${root}/include/torch/csrc/api/include)
  target_compile_options(steadynorm_libtorch INTERFACE -ffile-prefix-map=${root}=torch)  # its checks hold __FILE__
  target_link_libraries(steadynorm_libtorch INTERFACE ${root}/lib/libtorch_cpu.so ${root}/lib/libc10.so)
  if(NOT headers STREQUAL "none")
    # The limited API of Python 3.10: what is compiled with one version's headers serves the later ones.
    add_library(steadynorm_libtorch_python INTERFACE IMPORTED)
    target_include_directories(steadynorm_libtorch_python SYSTEM INTERFACE ${headers})
    target_compile_definitions(steadynorm_libtorch_python INTERFACE Py_LIMITED_API=0x030A0000)
    target_link_libraries(steadynorm_libtorch_python INTERFACE steadynorm_libtorch ${root}/lib/libtorch_python.so)
    set(STEADYNORM_WITH_TORCH_PYTHON ON)
  endif()
  set(STEADYNORM_WITH_TORCH ON)
  set(STEADYNORM_TORCH_VERSION ${version})
  set(STEADYNORM_TORCH_SUMMARY "${version} on CPU")

  if(STEADYNORM_WITH_CUDA AND EXISTS ${root}/lib/libc10_cuda.so)
    if(CUDAToolkit_VERSION_MAJOR STREQUAL cuda)
      add_library(steadynorm_libtorch_cuda INTERFACE IMPORTED)
      target_link_libraries(steadynorm_libtorch_cuda INTERFACE ${root}/lib/libc10_cuda.so CUDA::cudart_static)
      set(STEADYNORM_WITH_TORCH_CUDA ON)
      set(STEADYNORM_TORCH_SUMMARY "${version} on CPU and CUDA ${cuda}")
    elseif(STEADYNORM_CUDA STREQUAL "AUTO")
      message(WARNING "torch is built for CUDA ${cuda} and the toolkit is ${CUDAToolkit_VERSION}: "
                      "the operator library is built without CUDA")
    else()
      message(FATAL_ERROR "STEADYNORM_CUDA=ON needs the toolkit of torch's CUDA ${cuda}, got ${CUDAToolkit_VERSION}")
    endif()
  endif()
  return(PROPAGATE STEADYNORM_WITH_TORCH STEADYNORM_WITH_TORCH_CUDA STEADYNORM_WITH_TORCH_PYTHON STEADYNORM_TORCH_VERSION
         STEADYNORM_TORCH_SUMMARY)
endfunction()

if(STEADYNORM_TORCH)  # AUTO or ON
  steadynorm_find_torch()
endif()
