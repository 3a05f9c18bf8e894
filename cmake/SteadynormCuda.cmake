# SPDX-License-Identifier: Apache-2.0
# Sets STEADYNORM_WITH_CUDA and, with it, the CUDA language and the architectures to build for.
include_guard()

set(STEADYNORM_WITH_CUDA OFF)
set(STEADYNORM_CUDA_SUMMARY "off")

if(STEADYNORM_CUDA)  # AUTO or ON
  # CMake itself looks for nvcc on PATH only.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(STEADYNORM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(STEADYNORM_NVCC)
      set(CMAKE_CUDA_COMPILER ${STEADYNORM_NVCC})
    endif()
  endif()

  # CMake tries the compiler on an architecture before its version is known; 90 is one that every supported nvcc has.
  set(steadynorm_architectures ${CMAKE_CUDA_ARCHITECTURES})
  if(NOT steadynorm_architectures)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()

  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.4 REQUIRED)
    if(NOT steadynorm_architectures)
      # Code for each, and PTX of the newest for the GPUs to come.
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
      else()
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
    endif()
    set(STEADYNORM_WITH_CUDA ON)
    list(JOIN CMAKE_CUDA_ARCHITECTURES " " STEADYNORM_CUDA_SUMMARY)
    set(STEADYNORM_CUDA_SUMMARY "${CUDAToolkit_VERSION} (${STEADYNORM_CUDA_SUMMARY})")
  elseif(NOT STEADYNORM_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "STEADYNORM_CUDA=ON needs nvcc on PATH, got none "
                        "(Debian package nvidia-cuda-toolkit, or NVIDIA's own CUDA toolkit 12.4 or newer)")
  else()
    set(STEADYNORM_CUDA_SUMMARY "off (no nvcc)")
  endif()
endif()
